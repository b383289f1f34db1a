//! A server in a process of its own, to be stopped or killed.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use uvfs_server::{ClientLimits, Clients};

use crate::common::{eventually, session};

/// Not a test by itself: the server that the others run in a process of its own, to be killed.
#[test]
fn server_to_be_killed() {
    let Some(dir) = std::env::var_os("UVFS_TEST_SERVER") else {
        return;
    };
    let dir = Path::new(&dir);
    let source = std::env::var_os("UVFS_TEST_SOURCE").unwrap();
    let session = session(source);
    let socket = std::env::var_os("UVFS_TEST_SOCKET").unwrap();
    let clients = Clients::listen(session, &dir.join(socket), ClientLimits::default()).unwrap();
    // Until the pipe is closed: told to end, or the test is over.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
    drop(clients);
}

/// A server in a process of its own.
pub struct Server(Child);

impl Server {
    pub fn start(dir: &Path, source: &str) -> Self {
        Self::start_at(dir, source, "sock")
    }

    pub fn start_at(dir: &Path, source: &str, socket: &str) -> Self {
        std::fs::create_dir_all(dir.join(source)).unwrap();
        let server = Self::begin(&mut Self::command(dir, source, socket));
        eventually("the server answers", || {
            std::os::unix::net::UnixStream::connect(dir.join(socket)).is_ok()
        });
        server
    }

    /// The command that [`Server::begin`] starts.
    pub fn command(dir: &Path, source: &str, socket: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "server::server_to_be_killed", "--nocapture"])
            .env("UVFS_TEST_SERVER", dir)
            .env("UVFS_TEST_SOURCE", dir.join(source))
            .env("UVFS_TEST_SOCKET", socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        command
    }

    /// Starts a server, which may not answer yet.
    pub fn begin(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    /// Its number.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// As SIGTERM would.
    pub fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Server {
    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = self.pid();
        kill_process(pid, signal).unwrap();
        if signal == Signal::STOP {
            let options = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
            waitid(WaitId::Pid(pid), options).unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
