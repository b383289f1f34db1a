//! Large files are read in a stream, which may be served by another thread than small requests are.

use std::fs;

use crate::harness::*;

/// Bytes that differ from page to page and from file to file.
fn contents(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    };
    (0..len / 8).flat_map(|_| next()).collect()
}

fn streams_and_small_requests_mix(transport: Transport) {
    if !has(&[Need::Mount(transport)]) {
        return;
    }
    let served = Served::new(&Serve::over(transport));
    for file in 1..=6 {
        let path = served.source.join(format!("large.{file}"));
        fs::write(path, contents(file, 12 << 20)).unwrap();
    }
    // Two at a time, while names are made, read and removed beside them; then on one core, where
    // callers of both kinds share a queue.
    let script = r#"
        streams() {
            for file in "$@"; do cmp "$source/large.$file" "$mount/large.$file"; done
        }
        small() {
            for i in $(seq 100); do
                echo "$i" > "$mount/small.$1.$i"
                test "$(cat "$mount/small.$1.$i")" = "$i"
                rm "$mount/small.$1.$i"
            done
        }
        source=$1 mount=$2
        streams 1 2 & a=$!
        streams 3 4 & b=$!
        small all & c=$!
        wait $a; wait $b; wait $c
        taskset -p -c "$(taskset -p -c $$ | sed 's/.*: *\([0-9]*\).*/\1/')" $$ > /dev/null
        streams 5 6 & a=$!
        small one & b=$!
        wait $a; wait $b
        ls "$mount"
    "#;
    let mut both = shell(script, &[&served.source, &served.mount.at]);
    let listed = served.mount.run_within(LATER, &mut both).ok();
    assert_eq!(listed.lines().count(), 6, "{listed}");
    served.mount.unmount();
}

/// Streams of several programs neither lose nor mix up data.
#[test]
fn streams_and_small_requests_mix_over_dev() {
    streams_and_small_requests_mix(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn streams_and_small_requests_mix_over_uring() {
    streams_and_small_requests_mix(Transport::Uring);
}
