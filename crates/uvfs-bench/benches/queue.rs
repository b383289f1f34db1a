//! A request through a queue pair in shared memory, and its answer back.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::os::fd::AsFd;
use std::thread;

use criterion::{Criterion, criterion_group, criterion_main};
use uvfs_queue::pair::{ClientQueue, Direction, ServerQueue};

const DEPTH: u32 = 8;

fn pair() -> (ClientQueue, ServerQueue) {
    let client = ClientQueue::create(DEPTH).expect("a queue");
    let fd = client.as_fd().try_clone_to_owned().expect("a descriptor");
    let server = ServerQueue::open(fd, 1 << 20, 1 << 20).expect("the queue's other end");
    (client, server)
}

fn submit(client: &ClientQueue) -> u32 {
    let id = client.reserve().expect("a free entry");
    client.submit(id, &[1; 40], &[2; 40], b"name", &[], Direction::ToServer);
    id
}

fn take(client: &ClientQueue) -> Option<u32> {
    let id = client.pop().expect("an honest server")?;
    let (mut header, mut inline) = ([0; 16], [0; 104]);
    client.reply(id, &mut header, &mut inline);
    client.release(id);
    Some(id)
}

/// Answers one request, if there is one.
fn serve(server: &ServerQueue) -> bool {
    let Some(taken) = server.pop().expect("an honest client") else {
        return false;
    };
    server.complete(taken.id, &[3; 16], &[4; 104]);
    true
}

fn round_trip(c: &mut Criterion) {
    let mut group = c.benchmark_group("queue round trip");
    // Both ends in one thread, without waiting for each other.
    let (client, server) = pair();
    group.bench_function("one thread", |b| {
        b.iter(|| {
            let id = submit(&client);
            assert!(serve(&server));
            assert_eq!(take(&client), Some(id));
        });
    });
    let (client, server) = pair();
    let serving = thread::spawn(move || {
        while !server.client_closed() {
            match serve(&server) {
                true => server.ring(),
                false => server.sleep(None),
            }
        }
    });
    group.bench_function("two threads, asleep", |b| {
        b.iter(|| {
            let id = submit(&client);
            client.ring();
            loop {
                match take(&client) {
                    Some(taken) => break assert_eq!(taken, id),
                    None => client.sleep(None),
                }
            }
        });
    });
    client.close();
    serving.join().expect("the server's thread");
}

criterion_group!(benches, round_trip);
criterion_main!(benches);
