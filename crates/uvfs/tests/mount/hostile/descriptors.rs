//! Users who send a server descriptors, to have it keep them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::ANY;
use super::users::user;
use crate::harness::*;

/// Connections in a row, which their maker gives up at once.
const FLOOD: usize = 3_000;

/// Attaches to the socket `$1`, each time with sockets that linger for the process that closes them last; then makes `$2` connections
/// that each leave a message behind.
const SENDS: &str = "import array, resource, socket, struct, sys, threading, time\n\
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n\
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n\
    message = struct.pack('=IIII16x', 0x75667661, 2, 0, 0)\n\
    listener = socket.socket()\n\
    listener.bind(('127.0.0.1', 0)); listener.listen(200)\n\
    kept = []\n\
    def lingering():\n\
    \x20 tcp = socket.socket(); tcp.connect(listener.getsockname()); kept.append(listener.accept())\n\
    \x20 tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 30000))\n\
    \x20 tcp.setblocking(False)\n\
    \x20 try:\n\
    \x20\x20 while True: tcp.send(b'x' * 65536)\n\
    \x20 except BlockingIOError: pass\n\
    \x20 return tcp\n\
    def attach(fds):\n\
    \x20 s = socket.socket(socket.AF_UNIX)\n\
    \x20 while True:\n\
    \x20\x20 try: s.connect(sys.argv[1]); break\n\
    \x20\x20 except BlockingIOError: time.sleep(0.001)\n\
    \x20 rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [f.fileno() for f in fds]))\n\
    \x20 try: s.sendmsg([message], [rights] if fds else [])\n\
    \x20 except (BrokenPipeError, ConnectionResetError): pass\n\
    \x20 return s\n\
    for n in range(60):\n\
    \x20 tcp = lingering(); kept.append(attach([tcp, tcp, tcp]))\n\
    \x20 threading.Thread(target=tcp.close, daemon=True).start()\n\
    print('sent', flush=True)\n\
    for n in range(int(sys.argv[2])): attach([]).close()\n\
    print('flooded', flush=True)\n\
    time.sleep(1000)";

/// Sockets that one user sends, and whose close waits, take a bounded number of the server's descriptors.
#[test]
fn a_user_without_an_open_file_takes_no_descriptors() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("getfattr")])
        || !has(&[Need::Program("python3")])
    {
        return;
    }
    let served = Served::new(&Serve::over(ANY));
    let socket = run(Command::new("getfattr")
        .args(["--only-values", "-n", "user.uvfs.socket"])
        .arg(&served.mount.at))
    .ok();
    let socket = socket.trim_end_matches('\0');
    let open = format!("/proc/{}/fd", served.mount.server.pid());
    let open = || fs::read_dir(&open).unwrap().count();
    let before = open();
    let mut sends = Command::new("python3");
    sends.args(["-c", SENDS, socket, &FLOOD.to_string()]);
    let mut sends = Running::start(sends.uid(user()).gid(user()));
    wait_for("the flood", || {
        assert!(sends.ended().is_none(), "{}", sends.stderr());
        sends.stdout().contains("flooded")
    });
    // 64 that wait, two for each of 128 sessions at most, and what came with them.
    wait_for("the server to close what it was sent", || {
        open() < before + 600
    });
    // Others attach: to a message that is none there is an answer.
    let mut other = UnixStream::connect(socket).unwrap();
    other.set_read_timeout(Some(SOON)).unwrap();
    other.write_all(&[0; 32]).unwrap();
    let mut answer = [0; 32];
    other.read_exact(&mut answer).unwrap();
    sends.kill();
    served.mount.unmount().ok();
}
