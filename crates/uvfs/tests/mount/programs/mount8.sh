# shellcheck shell=bash
# mount(8) with the helper installed, in a mount namespace of its own: what it says and shows for uvfs
# and for a file system of the kernel. mount8.sh UVFS DIRECTORY WHAT
uvfs=$1 dir=$2
# /sbin with the helper.
sbin=$(readlink -f /sbin)
mkdir -p "$dir"/{sbin,source,at} /run/mount
mount --bind "$sbin" "$dir/sbin"
mount -t tmpfs -o mode=755 sbin "$sbin"
ln -s "$dir"/sbin/* "$sbin"/
ln -s "$uvfs" "$sbin/mount.fuse.uvfs"
# mount(8)'s own notes.
mount -t tmpfs -o mode=755 utab /run/mount
touch /run/mount/utab
mount -t tmpfs -o mode=755 source "$dir/source"
at=$dir/at

gone() { umount "$at" 2>/dev/null; }

show() {
  local status=$1
  shift
  if [ "$status" != 0 ] || ! mountpoint -q "$at"; then
    echo "$*: exit $status"
  else
    # Without what only FUSE's superblock shows.
    echo "$*: $(findmnt -rno VFS-OPTIONS,FS-OPTIONS "$at" | sed 's/,user_id=.*//') $(grep -o 'OPTS=.*' /run/mount/utab)"
  fi
}

# The words of mount(8).
words() {
  for words in defaults suid,dev nosuid nodev,noexec ro,noatime nodiratime relatime strictatime lazytime \
    strictatime,nodiratime noatime,relatime noatime,atime relatime,norelatime nosuid,suid sync,dirsync \
    nosymfollow iversion silent,loud user users owner group user,exec users,suid user=nobody _netdev \
    nofail,auto x-systemd.automount,x-systemd.requires=/a,x-foo X-mount.mkdir comment=hi \
    noauto,nouser,nousers,noowner,nogroup,nomand rw,,ro bogus bogus=7; do
    "$@" -o "$words" "$at"
    show $? "$words"
    gone
  done
  "$@" -f "$at"
  echo "fake: exit $? $(mountpoint -q "$at" && echo mounted)"
  "$@" -r "$at"
  show $? read-only
  gone
  "$@" "$dir/missing/at"
  echo "missing mount point: exit $? $(ls -d "$dir/missing")"
  "$@" -o X-mount.mkdir "$dir/made"
  echo "mount point to be made: exit $?"
  umount "$dir/made"
  rmdir "$dir/made"
  "$@" -N /proc/$$/ns/mnt "$at"
  show $? namespace
  gone
  "$@" -o noatime,nosuid "$at"
  for words in ro rw noexec strictatime relatime,nodiratime exec,dev rw,sync async,noatime bind,ro bind,rw; do
    mount -o "remount,$words" "$at"
    show $? "remount,$words"
    touch "$at/file" && echo written
  done
  gone
}

# Of the source's mount, and of what is mounted below it.
inherited() {
  for options in rw nosuid nodev,noexec; do
    mount -o "remount,rw,suid,dev,exec,$options" "$dir/source"
    "$@" "$dir/source" "$at"
    show $? "source $options" | sed 's/,mode=755//'
    gone
  done
  mount -o remount,rw,suid,dev,exec "$dir/source"
}

# A set-user-id program and a device, used by another user.
privileges() {
  install -m 4755 -o 1234 "$(command -v id)" "$dir/source/id"
  rm -f "$dir/source/null"
  mknod -m 666 "$dir/source/null" c 1 3
  for options in rw nosuid nodev noexec; do
    "$@" -o "$options" "$dir/source" "$at"
    # A bind mount takes options as a remount alone.
    if [ "$(findmnt -rno FSTYPE "$at")" = tmpfs ]; then mount -o "remount,bind,$options" "$at"; fi
    echo "$options: runs as $(setpriv --reuid=65534 --regid=65534 --clear-groups "$at/id" -u 2>&1 | sed 's/.*: //')"
    echo "$options: device $(setpriv --reuid=65534 --regid=65534 --clear-groups cat "$at/null" 2>&1 | sed 's/.*: //')"
    gone
  done
}

# The numbers of df; not the time at which they were taken.
sizes() {
  head -c 3000000 /dev/zero >"$dir/source/zeros"
  "$@" "$dir/source" "$at"
  df --output=size,used,avail,pcent,itotal,iused,iavail,target "$at" | tail -1
  stat -f -c '%l %s %S %b %f %a %c %d' "$at"
  findmnt -rbno SIZE,USED,AVAIL,TARGET "$at"
  gone
}

# uvfs alone.
names() {
  ln -s "$dir/source" "$dir/link"
  for options in rw fsname=a-name,subtype=other subtype=; do
    mount -t fuse.uvfs -o "$options" "$dir/link" "$at"
    echo "$options: $? $(df --output=source,fstype "$at" | tail -1 | tr -s ' ') $(findmnt -rno SOURCE,FSTYPE "$at")"
    "$uvfs" umount "$at"
  done
  echo "$dir/source $at fuse.uvfs allow_other,_netdev,x-systemd.requires=/,nofail 0 0" >"$dir/fstab"
  for _ in 1 2; do
    mount -a -T "$dir/fstab"
    echo "mount -a: $? $(grep -c " $at fuse.uvfs" /proc/self/mounts)"
  done
  mount -T "$dir/fstab" -o remount,ro "$at"
  echo "remount of fstab: $? $(findmnt -rno OPTIONS "$at")"
  mount -o remount,rw "$at"
  echo "remount without fstab: $? $(findmnt -rno OPTIONS "$at")"
  mount -t fuse.uvfs -o remount,nosuid "$dir/source" "$at"
  echo "remount of both: $? $(findmnt -rno OPTIONS "$at")"
  mount -o remount,bogus "$at" 2>/dev/null
  echo "remount,bogus: $? $(findmnt -rno OPTIONS "$at")"
  umount -T "$dir/fstab" "$at" 2>/dev/null || umount "$at"
  echo "umount: $? $(mountpoint "$at")"
  mount -t fuse.uvfs -o sync "$dir/source" "$at"
  mount -o remount,allow_other "$at"
  echo "remount,allow_other: $?"
  umount "$at"
  mount -t fuse.uvfs -o nofail "$dir/nowhere" "$at"
  echo "nofail: $? $(mountpoint "$at")"
  mount -t fuse.uvfs "$dir/nowhere" "$at"
  echo "nowhere: $?"
  mount -t fuse.uvfs -s -o bogus,nosuid "$dir/source" "$at"
  show $? sloppy
  gone
  mkdir "$dir/source/below"
  mount -t tmpfs -o nosuid,noexec below "$dir/source/below"
  mount -t fuse.uvfs "$dir/source" "$at"
  show $? 'nosuid below'
  gone
  mount -t fuse.uvfs -o xdev "$dir/source" "$at"
  show $? 'nosuid below, xdev'
  gone
}

# By the user nobody, as fstab permits.
as_user() {
  chown 65534 "$at"
  cat >"$dir/fstab"
  mount --bind "$dir/fstab" /etc/fstab
  # As udev has it; a container may have it for root alone.
  mknod -m 666 "$dir/fuse" c 10 229
  mount --bind "$dir/fuse" /dev/fuse
  nobody() { setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }
  nobody mount "$at"
  echo "mounted: $? $(findmnt -rno VFS-OPTIONS "$at")"
  nobody umount "$at"
  echo "unmounted: $? $(mountpoint -q "$at" && echo mounted)"
  gone
}

case $3 in
  words\ kernel) words mount -t tmpfs none ;;
  words\ uvfs) words mount -t fuse.uvfs "$dir/source" ;;
  inherited\ kernel) inherited mount --bind ;;
  inherited\ uvfs) inherited mount -t fuse.uvfs ;;
  privileges\ kernel) privileges mount --bind ;;
  privileges\ uvfs) privileges mount -t fuse.uvfs -o allow_other ;;
  sizes\ kernel) sizes mount --bind ;;
  sizes\ uvfs) sizes mount -t fuse.uvfs ;;
  names) names ;;
  user\ kernel) echo "none $at tmpfs user,noauto 0 0" | as_user ;;
  user\ uvfs) echo "$dir/source $at fuse.uvfs user,noauto 0 0" | as_user ;;
esac
exit 0
