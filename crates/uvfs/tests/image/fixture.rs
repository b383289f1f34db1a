//! An image with a bit of everything, made by the kernel.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::*;

/// The needs of an image besides a mount.
pub const NEEDS: [Need; 7] = [
    Need::Mount(Transport::Dev),
    Need::Uvfs,
    Need::Program("mkfs.xfs"),
    Need::Program("xfs_io"),
    Need::Program("setfattr"),
    Need::Program("setfacl"),
    Need::Program("losetup"),
];

/// Fills the current directory.
pub const FILL: &str = r#"
mkdir -p a/b/c empty many
printf 'hello\n' > a/hello
head -c 300000 /dev/urandom > a/data
truncate -s 10M a/sparse
printf end | dd of=a/sparse bs=1 seek=5000000 conv=notrunc status=none
: > a/nothing
for i in $(seq 400); do printf '%s' "$i" > many/a-name-of-some-length-$i; done
mkdir $(seq -f 'many/dir-%03g' 40)
for d in many/dir-*; do printf '%s' "$d" > $d/file; done
ln a/data a/b/hard
ln -s ../data a/b/relative
ln -s /a/hello absolute
ln -s "$(printf 'x%.0s' $(seq 700))" long
mkfifo a/fifo
mknod a/null c 1 3
mknod a/disk b 259 77777
setfattr -n user.color -v blue a/data
setfattr -n user.big -v "$(printf 'y%.0s' $(seq 5000))" a/hello
setfattr -n trusted.note -v hidden a/b
setfacl -m u:1:r a/hello
chown 1000:100 a/b a/hello
chmod 4755 a/data
chmod 1777 empty
touch -d '1985-01-02 03:04:05.678901234 UTC' a/sparse
touch -h -d '2001-02-03 04:05:06.7 UTC' long
"#;

/// An image of a file system on a tmpfs in `scratch`.
pub struct Image<'a> {
    scratch: &'a Scratch,
    name: String,
    pub path: PathBuf,
}

impl<'a> Image<'a> {
    /// An empty file system.
    pub fn empty(scratch: &'a Scratch, name: &str) -> Image<'a> {
        Image::of_size(scratch, name, 400 << 20)
    }

    /// One of so many bytes, of which only what is used takes room.
    pub fn of_size(scratch: &'a Scratch, name: &str, bytes: u64) -> Image<'a> {
        let disk = scratch.tmpfs(&format!("{name}-disk"), "700m");
        let path = disk.join("image");
        File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .expect("image");
        run(command("mkfs.xfs", ["-q", "-f"]).arg(&path)).ok();
        Image {
            scratch,
            name: name.into(),
            path,
        }
    }

    /// One with files.
    pub fn filled(scratch: &'a Scratch) -> Image<'a> {
        let image = Image::empty(scratch, "filled");
        image.write(FILL);
        image
    }

    /// Runs a script in the file system.
    pub fn write(&self, script: &str) {
        let at = self.mount("rw");
        run(shell(script, &[]).current_dir(&at)).ok();
        self.unmount(&at);
    }

    /// Mounts it by the kernel; gives where. Goes with the scratch directory, if not before.
    pub fn mount(&self, options: &str) -> PathBuf {
        let at = self.scratch.path(&format!("{}-kernel", self.name));
        if !at.exists() {
            self.scratch.dir(&format!("{}-kernel", self.name));
        }
        let options = format!("loop,{options}");
        run(command("mount", ["-t", "xfs", "-o", &options])
            .arg(&self.path)
            .arg(&at))
        .ok();
        at
    }

    /// As the kernel shows it, for comparison.
    pub fn shown_by_kernel(&self) -> PathBuf {
        self.mount("ro,norecovery,noatime")
    }

    pub fn unmount(&self, at: &Path) {
        run(Command::new("umount").arg(at)).ok();
    }

    /// Leaves changes in the log, as a crash does.
    pub fn crash(&self) {
        let at = self.mount("rw");
        run(&mut shell(
            r#"printf new > "$1/new" && xfs_io -x -c 'shutdown -f' "$1""#,
            &[&at],
        ))
        .ok();
        self.unmount(&at);
    }

    /// The path as an argument.
    pub fn arg(&self) -> &str {
        self.path.to_str().expect("a path in UTF-8")
    }
}

/// The script that tells all about the tree in the current directory. `$1` is what find prints of
/// a file, `$2` of a directory, `$3` where it begins.
const DESCRIBE: &str = r#"
find . $3 \( -type d -printf "$2" -o -printf "$1" \) | sort
find . -type f -print0 | sort -z | xargs -0 md5sum
find . -print0 | sort -z | xargs -0 getfattr -hd -e hex -m -
"#;

/// The command that describes a tree, for comparison. `copied`: without what a copy may change.
pub fn describe(root: &Path, copied: bool) -> Command {
    let facts = r"%P %y %m %n %U %G %T@ %l";
    let (file, dir, from) = if copied {
        let file = format!("{facts} %s\n");
        (file, format!("{facts}\n"), "-mindepth 1")
    } else {
        let all = format!("{facts} %s %i %b %A@ %C@\n");
        (all.clone(), all, "")
    };
    let mut command = shell(DESCRIBE, &[&*file, &*dir, from].map(Path::new));
    command.current_dir(root);
    command
}

/// Fails with the first lines that are not the same.
#[track_caller]
pub fn same(ours: &str, expected: &str) {
    let lines = ours.lines().zip(expected.lines()).filter(|(a, b)| a != b);
    let lines = lines
        .take(5)
        .map(|(a, b)| format!("{a:.300}\n  should be\n{b:.300}"));
    let lines: Vec<_> = lines.collect();
    let (a, b) = (ours.lines().count(), expected.lines().count());
    assert!(
        ours == expected,
        "{a} lines, {b} expected\n{}",
        lines.join("\n")
    );
}
