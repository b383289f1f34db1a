//! The one thread at a time that collects completions.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use uvfs_io::device::Geometry;
use uvfs_io::engine::{self, Engine, EngineStats, Io};

use super::*;

/// An engine whose looks for completions last until the test lets them end, and find nothing.
struct LongLooks {
    engine: Arc<dyn Engine>,
    begins: Sender<()>,
    ends: Mutex<Receiver<()>>,
}

impl Engine for LongLooks {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn geometry(&self) -> Geometry {
        self.engine.geometry()
    }

    fn depth(&self) -> usize {
        self.engine.depth()
    }

    fn submit(&self, ios: &mut Vec<Io>) {
        self.engine.submit(ios);
    }

    fn reap(&self, wait: bool, out: &mut Vec<Io>) -> usize {
        if wait {
            return self.engine.reap(wait, out);
        }
        self.begins.send(()).unwrap();
        self.ends.lock().unwrap().recv().unwrap();
        0
    }

    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }
}

/// A thread that reads while another one looks for completions goes on when that one has found none and is gone.
#[test]
fn a_look_that_finds_nothing_wakes_a_waiting_thread() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), 8);
    let device = Arc::new(Device::open(&path, OpenOptions::default()).unwrap());
    let engine = engine::open(EngineKind::Sync, device, EngineConfig::default()).unwrap();
    let ((begins, begun), (end, ends)) = (channel(), channel());
    let engine = LongLooks {
        engine,
        begins,
        ends: Mutex::new(ends),
    };
    let target = Target::with_engine(Arc::new(engine), Config::default()).unwrap();
    let looks = target.clone();
    let looks = std::thread::spawn(move || {
        let nothing: [&[Extent]; 0] = [];
        looks.readahead(nothing, &Addressed, Prefetch::Exact)
    });
    begun.recv().unwrap();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let read = target
            .read(&block(3), &Addressed)
            .map(|buffer| buffer.read()[8]);
        tell.send(read.unwrap()).unwrap();
    });
    // It comes to its wait.
    let early = told.recv_timeout(Duration::from_millis(200));
    end.send(()).unwrap();
    assert_eq!(looks.join().unwrap(), 0);
    assert!(early.is_err(), "the look did not hold it up");
    assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(3));
}
