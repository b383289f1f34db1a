#!/usr/bin/env bash
# Builds a fuzz target with the stable compiler, and runs it on what was found before and on new inputs:
#
#     fuzz/run.sh repair -max_total_time=60
#
# More arguments go to libFuzzer. Needs a C++ compiler, and root for the targets `xfs_image` and `repair`,
# unless UVFS_FUZZ_IMAGE names an image (see image.sh). New inputs are kept in fuzz/corpus/TARGET; those in
# fuzz/seeds/TARGET are a part of them that reaches the same code:
#
#     fuzz/run.sh repair -merge=1 -set_cover_merge=1 -use_counters=0 fuzz/seeds/repair
set -euo pipefail
target=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# What `cargo fuzz` asks of the compiler, less the sanitizers, for which it takes a nightly one.
flags=(-Cpasses=sancov-module -Cdebug-assertions -Coverflow-checks)
for f in level=4 inline-8bit-counters pc-table trace-compares; do
  flags+=("-Cllvm-args=-sanitizer-coverage-$f")
done
host=$(rustc -vV | sed -n 's/^host: //p')
# With a target of its own the flags are not for build scripts.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$here/target}
RUSTFLAGS="${flags[*]}" cargo build --quiet --locked --release --manifest-path "$here/Cargo.toml" \
  --target "$host" --bin "$target"
case $target in
xfs_image | repair)
  if [ -z "${UVFS_FUZZ_IMAGE:-}" ]; then
    sh "$here/image.sh" "$dir/image"
    export UVFS_FUZZ_IMAGE=$dir/image
  fi
  ;;
esac
mkdir -p "$here/corpus/$target" "$here/artifacts/$target" "$here/seeds/$target"
cd "$here/.."
"$CARGO_TARGET_DIR/$host/release/$target" -timeout=60 -max_len=256 -artifact_prefix="$here/artifacts/$target/" \
  "$@" "$here/corpus/$target" "$here/seeds/$target"
