//! Clients beside a mount of the same directory.

use uvfs_testing::{Need, has};

use super::*;

/// Not a test by itself: serves a mount, and clients beside it.
#[test]
fn serves_a_mount() {
    let Some((dir, transport)) = environment() else {
        return;
    };
    let options = MountOptions {
        name: "leases".into(),
        subtype: "uvfs-test".into(),
        allow_other: false,
        default_permissions: false,
        flags: rustix::mount::MountFlags::empty(),
        ..MountOptions::default()
    };
    let (transport, writeback) = match transport.as_str() {
        "uring" => (Transport::Uring, false),
        "writeback" => (Transport::Dev, true),
        _ => (Transport::Dev, false),
    };
    let fs = uvfs_passthrough::Options {
        writeback,
        // Clients get leases of the files that the kernel has open.
        passthrough: uvfs_passthrough::Backed::Off,
        watch: false,
        // Longer than the test: nothing becomes right by itself.
        attr_ttl: Duration::from_secs(3600),
        entry_ttl: Duration::from_secs(3600),
        ..Default::default()
    };
    let fs = Passthrough::open(dir.join("data"), fs).unwrap();
    let device = mount(&dir.join("mount"), &options).unwrap().device();
    let session = Arc::new(Session::new(fs, device.unwrap(), SessionOptions::default()));
    let server = Server::start(
        session.clone(),
        ServerOptions {
            transport,
            ..Default::default()
        },
    )
    .unwrap();
    let limits = ClientLimits {
        recall: Duration::from_secs(20),
        ..ClientLimits::default()
    };
    let clients = Clients::listen(session, &dir.join("sock"), limits).unwrap();
    println!("\nready");
    server.wait();
    drop(clients);
}

struct Mounted {
    helper: Option<Helper>,
    dir: tempfile::TempDir,
}

impl Mounted {
    fn over(transport: &str) -> Option<Self> {
        if !has(&[Need::mount_over(transport)]) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        for name in ["data", "mount"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let helper = Some(Helper::start(
            "mounted::serves_a_mount",
            dir.path(),
            transport,
        ));
        Some(Self { helper, dir })
    }

    fn kernel(&self, name: &str) -> Box<dyn Use> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.dir.path().join("mount").join(name));
        Box::new(Kernel(file.unwrap()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.dir.path().join("mount"), true);
        let mut helper = self.helper.take().expect("until here");
        let deadline = Instant::now() + Duration::from_secs(20);
        while helper.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if Instant::now() > deadline {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn with_a_mount(transport: &str) {
    let Some(mounted) = Mounted::over(transport) else {
        return;
    };
    let (ops, time) = times();
    let clients = [client(mounted.dir.path()), client(mounted.dir.path())];
    let open = |c: &Client, name: &str| Box::new(c.open(name, rw()).unwrap()) as Box<dyn Use>;
    let mut users = vec![vec![mounted.kernel("a"), mounted.kernel("b")]];
    for c in &clients {
        users.push(vec![open(c, "a"), open(c, "b")]);
    }
    one_at_a_time(&users, 2, ops);
    drop(users);
    let mut users = vec![mounted.kernel("f"), mounted.kernel("f")];
    for c in &clients {
        users.push(open(c, "f"));
    }
    all_at_once(users, 2, time);
    // Names too.
    let at = |name: &str| mounted.dir.path().join("mount").join(name);
    clients[0].mkdir("d", 0o755).unwrap();
    assert!(at("d").is_dir());
    clients[0]
        .rename("a", "d/c", rustix::fs::RenameFlags::empty())
        .unwrap();
    assert!(at("d/c").exists() && !at("a").exists());
    clients[1].unlink("d/c").unwrap();
    assert_eq!(std::fs::read_dir(at("d")).unwrap().count(), 0);
    assert!(!at("d/c").exists());
    drop(clients);
}

/// The kernel and clients see the same contents of one file.
#[test]
fn two_clients_and_a_mount_over_dev() {
    with_a_mount("dev");
}

/// The same over io_uring.
#[test]
fn two_clients_and_a_mount_over_uring() {
    with_a_mount("uring");
}

/// A client sees what the kernel has not written back yet.
#[test]
fn a_mount_that_writes_back() {
    let Some(mounted) = Mounted::over("writeback") else {
        return;
    };
    let client = client(mounted.dir.path());
    let kernel = mounted.kernel("f");
    kernel.write(&[1; 20_000], 0, Flags::empty());
    let file = client.open("f", rw()).unwrap();
    assert_eq!(file.stat().unwrap().size, 20_000);
    // In turns, without any change of the size.
    let mut random = Random(3);
    let mut model = vec![1; 20_000];
    let users: [&dyn Use; 2] = [&*kernel, &file];
    for op in 0..if full() { 3000 } else { 300 } {
        let user = random.below(2) as usize;
        let (at, len) = (random.below(15_000), 1 + random.below(5_000) as usize);
        let range = at as usize..at as usize + len;
        if random.below(2) == 0 {
            let data = vec![random.below(256) as u8; len];
            users[user].write(&data, at, Flags::empty());
            model[range].copy_from_slice(&data);
        } else {
            let mut buf = vec![0; len];
            assert_eq!(users[user].read(&mut buf, at, Flags::empty()), len);
            assert!(
                buf == model[range],
                "op {op}: user {user} reads {len} at {at}"
            );
        }
    }
    drop(file);
    drop(client);
}
