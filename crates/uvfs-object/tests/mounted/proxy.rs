//! A proxy before a store that does to it what networks and stores do.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    Pass,
    /// Nothing passes before this ends, and nothing is closed.
    Stall,
    /// Connections are closed as soon as they begin.
    Refuse,
    /// Every request is answered with 503.
    Unavailable,
    /// Answers break off after some bytes.
    Cut,
}

const MODES: [Mode; 5] = [
    Mode::Pass,
    Mode::Stall,
    Mode::Refuse,
    Mode::Unavailable,
    Mode::Cut,
];
/// Bytes of an answer that is cut.
const PART: usize = 20_000;

pub struct Proxy {
    address: SocketAddr,
    does: Arc<Does>,
}

/// What a proxy does, and has done.
#[derive(Default)]
struct Does {
    mode: AtomicU8,
    /// Microseconds that a request takes longer.
    delay: AtomicU64,
    /// Bytes that the store has answered.
    answered: AtomicU64,
}

impl Does {
    fn mode(&self) -> Mode {
        MODES[usize::from(self.mode.load(Ordering::SeqCst))]
    }
}

impl Proxy {
    pub fn start(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let does = Arc::new(Does::default());
        let shared = does.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let does = shared.clone();
                std::thread::spawn(move || connection(client, upstream, &does));
            }
        });
        Self { address, does }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Also for connections that are there.
    pub fn set(&self, mode: Mode) {
        self.does.mode.store(mode as u8, Ordering::SeqCst);
    }

    /// Every request takes so much longer.
    pub fn delay(&self, time: Duration) {
        let micros = time.as_micros() as u64;
        self.does.delay.store(micros, Ordering::SeqCst);
    }

    /// Bytes that the store has answered so far.
    pub fn answered(&self) -> u64 {
        self.does.answered.load(Ordering::SeqCst)
    }
}

fn connection(client: TcpStream, upstream: SocketAddr, does: &Arc<Does>) {
    let Ok(server) = TcpStream::connect(upstream) else {
        return;
    };
    // Head and body may come in two parts.
    for side in [&client, &server] {
        let _ = side.set_nodelay(true);
    }
    let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    let requests = does.clone();
    let up = std::thread::spawn(move || {
        let mut data = [0; 16 << 10];
        while let Ok(len @ 1..) = from.read(&mut data) {
            let delay = requests.delay.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_micros(delay));
            while requests.mode() == Mode::Stall {
                std::thread::sleep(Duration::from_millis(20));
            }
            match requests.mode() {
                Mode::Pass | Mode::Cut | Mode::Stall => {
                    if to.write_all(&data[..len]).is_err() {
                        break;
                    }
                }
                Mode::Refuse => {
                    let _ = from.shutdown(Shutdown::Both);
                    break;
                }
                Mode::Unavailable => {
                    let answer = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n";
                    if from.write_all(answer.as_bytes()).is_err() {
                        break;
                    }
                }
            }
        }
        // The store answers what it has got.
        let _ = to.shutdown(Shutdown::Write);
    });
    let (mut from, mut to) = (server, client);
    let mut data = [0; 16 << 10];
    let mut passed = 0;
    while let Ok(len @ 1..) = from.read(&mut data) {
        while does.mode() == Mode::Stall {
            std::thread::sleep(Duration::from_millis(20));
        }
        let cut = does.mode() == Mode::Cut && passed + len > PART;
        if cut || to.write_all(&data[..len]).is_err() {
            break;
        }
        passed += len;
        does.answered.fetch_add(len as u64, Ordering::SeqCst);
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
    let _ = up.join();
}
