#!/bin/sh
# Makes a small image with every structure of an XFS file system in it, for the target xfs_image:
#
#     fuzz/image.sh rich.img && UVFS_FUZZ_IMAGE=rich.img fuzz/run.sh xfs_image
#
# Root only: it is filled through the kernel. More arguments go to mkfs.xfs, instead of the features
# that it switches on otherwise (-m crc=0 makes an image of version 4). With CUT=1 in the environment it is cut off
# with a dirty log, for the target xfs_log.
set -eu
image=$1
shift
[ $# -gt 0 ] || set -- -m rmapbt=1,reflink=1,bigtime=1
rm -f "$image"
truncate -s 34M "$image"
mkfs.xfs -q -f --unsupported -b size=1024 -d agcount=2 "$@" "$image" 2>/dev/null
dir=$(mktemp -d)
trap 'umount "$dir" 2>/dev/null || true; rmdir "$dir"' EXIT
mount -o loop "$image" "$dir"
cd "$dir"
mkdir few some many
for i in 1 2 3; do echo "$i" > few/f$i; done
for i in $(seq 30); do : > some/entry-with-a-name-$i; done
for i in $(seq 220); do ln few/f1 many/$i-entry-with-quite-a-long-name-so-that-blocks-fill; done
ln -s target few/short
ln -s "$(printf 'x%.0s' $(seq 900))" few/long
mkfifo few/fifo
mknod few/null c 1 3
# Many extents: a B-tree.
for i in $(seq 0 2 160); do
    dd if=/dev/zero of=holes bs=1024 count=1 seek="$i" conv=notrunc status=none
done
for i in $(seq 4000); do echo "some data to share $i"; done > data
cp --reflink=auto data shared
dd if=/dev/zero of=shared bs=1024 count=3 seek=5 conv=notrunc status=none
fallocate -l 40k unwritten
# Attributes: in the inode, in a leaf, in a tree, remote.
setfattr -n user.a -v 1 few/f1
for i in $(seq 12); do setfattr -n user.some-attribute-$i -v value-$i few/f2; done
for i in $(seq 90); do
    setfattr -n user.another-quite-long-attribute-$i -v "$(printf 'v%.0s' $(seq 60))" few/f3
done
setfattr -n user.remote -v "$(printf 'r%.0s' $(seq 3000))" data
cd /
[ -z "${CUT:-}" ] || xfs_io -x -c 'shutdown -f' "$dir"
umount "$dir"
