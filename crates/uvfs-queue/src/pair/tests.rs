use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::shm::SharedMemory;

use super::client::ClientQueue;
use super::server::ServerQueue;
use super::{Direction, INFO, INLINE_SIZE, NOTIFY_DEPTH, Seg};

fn pair(depth: u32) -> (ClientQueue, ServerQueue) {
    let client = ClientQueue::create(depth).unwrap();
    let fd = client.as_fd().try_clone_to_owned().unwrap();
    let server = ServerQueue::open(fd, 1 << 20, 1 << 20).unwrap();
    (client, server)
}

/// A client's request reaches the server unchanged, and its reply comes back.
#[test]
fn a_request_travels_and_its_reply_comes_back() {
    let (client, server) = pair(4);
    assert!(server.pop().unwrap().is_none());
    let id = client.reserve().unwrap();
    let segs = [Seg {
        offset: 4096,
        len: 100,
    }];
    let name: Vec<u8> = (0..INLINE_SIZE).map(|i| i as u8).collect();
    client.submit(id, b"header", b"op", &name, &segs, Direction::ToServer);
    let got = server.pop().unwrap().unwrap();
    assert_eq!(&got.header[..6], b"header");
    assert_eq!(
        (&got.op[..got.op_len], &got.segs[..]),
        (&b"op"[..], &segs[..])
    );
    let mut inline = Vec::new();
    server.inline(&got, |at, part| {
        assert_eq!(at, inline.len());
        inline.extend_from_slice(part);
    });
    assert_eq!(inline, name);
    assert_eq!(server.taken.load(Ordering::Relaxed).count_ones(), 1);
    server.complete(got.id, b"reply!", b"attr");
    assert_eq!(client.pop().unwrap(), Some(id));
    let (mut header, mut inline) = ([0; 6], [0; 4]);
    client.reply(id, &mut header, &mut inline);
    assert_eq!((&header, &inline), (b"reply!", b"attr"));
    client.release(id);
}

/// A client has no more requests under way than the rings hold.
#[test]
fn entries_are_bounded() {
    let (client, _server) = pair(2);
    let (a, b) = (client.reserve().unwrap(), client.reserve().unwrap());
    assert_ne!(a, b);
    assert_eq!(client.reserve(), None);
    client.release(a);
    assert_eq!(client.reserve(), Some(a));
}

/// Each request is answered, also when both sides go to sleep in between.
#[test]
fn threads_on_both_sides_lose_nothing_and_sleep_when_idle() {
    const EACH: u32 = 5_000;
    let (client, server) = pair(8);
    let server_side = std::thread::spawn(move || {
        let mut n = 0;
        loop {
            match server.pop().unwrap() {
                Some(s) => {
                    n += 1;
                    server.complete(s.id, &s.header[..8], b"");
                    server.ring();
                }
                None if server.client_closed() => return n,
                None => server.sleep(None),
            }
        }
    });
    let client = &client;
    let done = AtomicU32::new(0);
    std::thread::scope(|s| {
        for t in 0..2u32 {
            s.spawn(move || {
                let mut i = 0;
                while i < EACH {
                    let Some(id) = client.reserve() else {
                        std::thread::yield_now();
                        continue;
                    };
                    let tag = u64::from(t) << 32 | u64::from(i);
                    client.submit(id, &tag.to_ne_bytes(), b"", b"", &[], Direction::ToServer);
                    client.ring();
                    i += 1;
                }
            });
        }
        s.spawn(|| {
            while done.load(Ordering::Relaxed) < 2 * EACH {
                match client.pop().unwrap() {
                    Some(id) => {
                        client.release(id);
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    None => client.sleep(None),
                }
            }
        });
    });
    client.close();
    assert_eq!(server_side.join().unwrap(), 2 * EACH);
}

/// Notifications arrive in order, and one too many is refused.
#[test]
fn notifications_are_bounded_and_arrive() {
    let (client, server) = pair(2);
    for i in 0..NOTIFY_DEPTH {
        assert!(server.notify(&i.to_ne_bytes()));
    }
    assert!(!server.notify(b"one too many"));
    for i in 0..NOTIFY_DEPTH {
        assert_eq!(
            client.pop_notification().unwrap().unwrap()[..4],
            i.to_ne_bytes()
        );
    }
    assert!(client.pop_notification().unwrap().is_none());
    assert!(server.notify(b"again"));
}

/// A server refuses requests that leave the client's arena or their areas, or name no free entry.
#[test]
fn a_hostile_client_is_found_out() {
    let segs = |s: Seg| {
        let (client, server) = pair(2);
        let id = client.reserve().unwrap();
        client.submit(id, b"", b"", b"", &[s], Direction::FromServer);
        server.pop().unwrap_err()
    };
    segs(Seg {
        offset: 1 << 20,
        len: 1,
    });
    segs(Seg {
        offset: u64::MAX,
        len: 2,
    });
    segs(Seg { offset: 0, len: 0 });
    segs(Seg {
        offset: 0,
        len: (1 << 20) + 1,
    });

    // The same entry twice, and one that does not exist.
    let (client, server) = pair(2);
    let id = client.reserve().unwrap();
    client.submit(id, b"", b"", b"", &[], Direction::ToServer);
    client.sq.push(id);
    assert!(server.pop().unwrap().is_some());
    server.pop().unwrap_err();
    client.sq.push(99);
    server.pop().unwrap_err();

    // Sizes beyond the areas.
    for at in [0, 4, 8, 12] {
        let (client, server) = pair(2);
        let id = client.reserve().unwrap();
        client.submit(id, b"", b"", b"", &[], Direction::ToServer);
        let info = client.layout.entry(id) + INFO;
        client.mem.write(info + at, &u32::MAX.to_ne_bytes());
        server.pop().unwrap_err();
    }
}

/// A client refuses numbers that the server may not send.
#[test]
fn a_hostile_server_is_found_out() {
    let (client, server) = pair(2);
    server.cq.push(1);
    client.pop().unwrap_err();
    server.cq.push(70);
    client.pop().unwrap_err();
    server.nq.push(NOTIFY_DEPTH);
    client.pop_notification().unwrap_err();
}

/// A server refuses memory that is not laid out as a queue pair.
#[test]
fn memory_that_is_no_queue_pair_is_refused() {
    let mem = SharedMemory::create(c"t", 1 << 20).unwrap();
    let fd = mem.as_fd().try_clone_to_owned().unwrap();
    assert!(ServerQueue::open(fd, 0, 0).is_err());
    let client = ClientQueue::create(4).unwrap();
    client.mem.u32_at(8).store(64, Ordering::Relaxed);
    let fd = client.as_fd().try_clone_to_owned().unwrap();
    assert!(ServerQueue::open(fd, 0, 0).is_err());
}
