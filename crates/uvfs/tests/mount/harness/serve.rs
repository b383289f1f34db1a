//! A mount and the server behind it.

use super::*;

/// How to serve a directory.
#[derive(Clone, Debug)]
pub struct Serve {
    pub transport: Transport,
    /// For `-o`.
    pub options: Vec<String>,
    /// The server's limit of open descriptors, soft and hard.
    pub descriptors: Option<u32>,
    /// The command; a copy of it where a test replaces that.
    pub program: PathBuf,
    /// Within how many of its writes each server that outlives being killed dies.
    pub dies: Option<u32>,
}

impl Serve {
    /// Serves all users, with the permissions of the files.
    pub fn over(transport: Transport) -> Serve {
        let options = vec!["allow_other".into(), "default_permissions".into()];
        Serve {
            transport,
            options,
            descriptors: None,
            program: env!("CARGO_BIN_EXE_uvfs").into(),
            dies: None,
        }
    }

    /// As [`Serve::over`], for tests of clients: they can have every file but those open with O_DIRECT, as the
    /// kernel does not keep files that are open for reading and writing to itself.
    pub fn for_clients(transport: Transport) -> Serve {
        Self::over(transport).option("passthrough=direct")
    }

    /// Adds an option for `-o`; the empty one is none.
    pub fn option(mut self, option: &str) -> Serve {
        if !option.is_empty() {
            self.options.push(option.into());
        }
        self
    }

    /// Has each server die within so many of the writes that outlive it ([`uvfs_sys::dying`]).
    pub fn dies_within(mut self, writes: u32) -> Serve {
        self.dies = Some(writes);
        self
    }

    pub fn descriptors(mut self, limit: u32) -> Serve {
        self.descriptors = Some(limit);
        self
    }

    /// The server in the foreground.
    fn command(&self, source: &Path, at: &Path) -> Command {
        let mut shell = Command::new("sh");
        let limit = self
            .descriptors
            .map_or(String::new(), |n| format!("ulimit -n {n} && "));
        if let Some(template) = substitute() {
            let uring = match self.transport {
                Transport::Dev => String::new(),
                Transport::Uring => std::env::var("UVFS_TEST_SERVER_URING").unwrap_or_default(),
            };
            let command = template
                .replace("{options}", &format!("-o {}", self.options.join(",")))
                .replace("{uring}", &uring)
                .replace("{source}", &source.display().to_string())
                .replace("{mountpoint}", &at.display().to_string());
            shell.args(["-c", &format!("{limit}exec {command}")]);
            return shell;
        }
        shell.args(["-c", &format!("{limit}exec \"$@\""), "sh"]);
        shell.arg(&self.program);
        shell.envs(
            self.dies
                .map(|writes| (uvfs_sys::dying::WITHIN, writes.to_string())),
        );
        shell.args([
            "mount",
            "--foreground",
            "--transport",
            &self.transport.to_string(),
        ]);
        shell
            .args(["-o", &self.options.join(",")])
            .arg(source)
            .arg(at);
        shell
    }
}

/// A served directory. Unmounts when dropped, and fails the test if that takes force.
pub struct Mount {
    pub at: PathBuf,
    pub server: Running,
    gone: bool,
}

impl Mount {
    /// Serves `source` at `at` and returns when the mount answers.
    #[track_caller]
    pub fn new(serve: &Serve, source: &Path, at: &Path) -> Mount {
        Mount::attempt(serve, source, at).unwrap_or_else(|outcome| panic!("no mount: {outcome}"))
    }

    /// The server's outcome when it ends instead of mounting.
    #[track_caller]
    pub fn attempt(serve: &Serve, source: &Path, at: &Path) -> Result<Mount, Outcome> {
        let server = Running::start(&mut serve.command(source, at));
        let mut mount = Mount {
            at: at.into(),
            server,
            gone: false,
        };
        let mut ended = None;
        let up = wait_until(SOON, || {
            ended = mount.server.ended();
            ended.is_some() || mounted(at).is_some_and(|m| m.kind.starts_with("fuse"))
        });
        if let Some(outcome) = ended {
            mount.gone = true;
            unmount_by_force(at);
            return Err(outcome);
        }
        assert!(up, "no mount after {SOON:?}: {}", mount.server.stderr());
        mount
            .run(Command::new("stat").arg("--file-system").arg(at))
            .ok();
        // The root's attributes, too: see `uvfs_server::mount::mount`. A mount of another user's gives none.
        mount.run(Command::new("stat").arg(at));
        Ok(mount)
    }

    /// Runs a program that uses the mount. If it hangs, the mount is ended so that it dies.
    #[track_caller]
    pub fn run(&self, command: &mut Command) -> Outcome {
        self.run_within(SOON, command)
    }

    #[track_caller]
    pub fn run_within(&self, limit: Duration, command: &mut Command) -> Outcome {
        let mut running = Running::start(command);
        running.wait(limit).unwrap_or_else(|| {
            self.abort();
            running.kill();
            let (program, server) = (running.stderr(), self.server.stderr());
            panic!(
                "{} hung for {limit:?}\n{program}\nserver: {server}",
                running.what
            )
        })
    }

    /// Ends the connection: every request fails from now on.
    pub fn abort(&self) {
        if let Some(mount) = mounted(&self.at) {
            mount.abort();
        }
    }

    /// Tells that the server is expected to be gone.
    pub fn expect_gone(&mut self) {
        self.gone = true;
    }

    /// Unmounts and gives the server's outcome.
    pub fn unmount(mut self) -> Outcome {
        self.end().unwrap_or_else(|e| panic!("{e}"))
    }

    pub fn end(&mut self) -> Result<Outcome, String> {
        self.gone = true;
        // In a process of its own, as a server that hangs may hold up unmounting.
        let start = || Running::start(Command::new("umount").arg(&self.at));
        let mut umount = start();
        let mut unmounted = umount.wait(SOON);
        // A process that the server started may still be looking whether the mount answers.
        wait_until(SOON, || match &unmounted {
            Some(outcome) if outcome.stderr.contains("target is busy") => {
                umount = start();
                unmounted = umount.wait(SOON);
                false
            }
            _ => true,
        });
        let stopped = match &unmounted {
            Some(outcome) if outcome.status.success() => self.server.wait(SOON),
            _ => None,
        };
        if let Some(outcome) = stopped {
            return Ok(outcome);
        }
        let log = self.server.stderr();
        unmount_by_force(&self.at);
        umount.kill();
        self.server.kill();
        Err(match unmounted {
            None => format!("umount hung; server: {log}"),
            Some(outcome) if outcome.status.success() => {
                format!("the server outlived its mount by {SOON:?}: {log}")
            }
            Some(outcome) => format!("{outcome}\nserver: {log}"),
        })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.gone {
            unmount_by_force(&self.at);
            self.server.kill();
        } else if let Err(e) = self.end() {
            if thread::panicking() {
                eprintln!("{e}");
            } else {
                panic!("{e}");
            }
        }
        if thread::panicking() {
            let log = self.server.stderr();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(40)..].join("\n");
            eprintln!("the server at {} said:\n{tail}", self.at.display());
        }
    }
}

/// A scratch directory with a tmpfs `source` and a mount point, for most tests.
pub struct Served {
    // Dropped in this order.
    pub mount: Mount,
    pub source: PathBuf,
    pub scratch: Scratch,
}

impl Served {
    #[track_caller]
    pub fn new(serve: &Serve) -> Served {
        let scratch = Scratch::new();
        let source = scratch.tmpfs("source", "2g");
        let mount = Mount::new(serve, &source, &scratch.dir("mount"));
        Served {
            mount,
            source,
            scratch,
        }
    }

    /// A path in the mount.
    pub fn at(&self, name: &str) -> PathBuf {
        self.mount.at.join(name)
    }

    /// Kills the server, does something, and serves the same again.
    #[track_caller]
    pub fn comes_back(&mut self, serve: &Serve, meanwhile: impl FnOnce()) -> Mount {
        self.mount.expect_gone();
        self.mount.server.signal(Signal::KILL);
        self.mount.server.wait(SOON).expect("it is killed");
        unmount_by_force(&self.mount.at);
        meanwhile();
        Mount::new(serve, &self.source, &self.mount.at)
    }
}
