//! `auto_unmount`: a process that takes the mount away when its server was killed.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Waits until the server has ended, however it ended: its standard input is a pipe that the server holds and never
/// writes to. Then it unmounts `$0`, if the mount with the number and the device of `$1` is the topmost one there.
/// The signals that end a server and its guard at once (systemd sends them to all processes of a unit) are for the
/// server. Not `fusermount3 -o auto_unmount`: of a mount without allow_other it believes that the server lives.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
read -r _
at='' top=''
while read -r id _ device _ path _; do
  [ "$id $device" = "$1" ] && at=$path
done </proc/self/mountinfo
[ -n "$at" ] || exit 0
while read -r id _ _ _ path _; do
  [ "$path" = "$at" ] && top=$id
done </proc/self/mountinfo
[ "$top" = "${1% *}" ] || exit 0
umount -l -- "$0" || fusermount3 -u -q -z -- "$0"
"#;

/// The process, until the mount has gone in an orderly way.
#[derive(Debug)]
pub(super) struct Guard(Child);

impl Guard {
    /// Starts it.
    pub(super) fn start(at: &Path, id: u64, device: &str) -> io::Result<Self> {
        let process = Command::new("/bin/sh")
            .args(["-c", SCRIPT])
            .arg(at)
            .arg(format!("{id} {device}"))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self(process))
    }

    /// The mount is gone: nothing is left to do.
    pub(super) fn dismiss(mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
