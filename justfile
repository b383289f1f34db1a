# The commands that one needs: `just` lists them. `just` itself: https://just.systems

mountpoint := "/tmp/uvfs-demo"

_default:
    @just --list --unsorted

# The commands and the libraries, with the one that `uvfs run` preloads
build:
    cargo build --release

# All tests, as CI runs them; `just test -p uvfs --test mount semantics` runs some
test *ARGS:
    ./test {{ARGS}}

# Unit tests, and tests that need no mount
quick:
    cargo test --workspace --lib

# Format, lints, documentation, unused dependencies, shell scripts (`./test --install` installs what this needs)
lint:
    .ci/lint

# Licences and sources of the dependencies; commit .ci/deny.sha256 with the Cargo.lock that passed
deny:
    ./test --deny

# Every interleaving of the lock-free parts
loom:
    RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p uvfs-queue --test loom --release

# Fuzzes one target: `just fuzz repair -max_total_time=60`
fuzz TARGET *ARGS:
    fuzz/run.sh {{TARGET}} {{ARGS}}

# Every benchmark in two minutes, as a page
bench REPORT="report.html":
    cargo build --profile dist -p uvfs -p uvfs-bench
    target/dist/uvfs bench all --quick --report {{REPORT}}

# The benchmarks of the parts, or one of them; criterion's options may follow
bench-parts NAME="*" *ARGS:
    cargo bench -p uvfs-bench --bench '{{NAME}}' -- {{ARGS}}

# The documentation of the libraries
doc:
    cargo doc --workspace --no-deps --open

# Serves SOURCE at a mount point until Ctrl-C
demo SOURCE=".":
    cargo run --release -p uvfs -- mount --foreground {{SOURCE}} {{mountpoint}}
