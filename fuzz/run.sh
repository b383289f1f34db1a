#!/usr/bin/env bash
# Builds a fuzz target, or all of them, with the stable compiler, and runs it on what was found before and on new
# inputs; all of them side by side, one for each core:
#
#     fuzz/run.sh repair -max_total_time=60
#     fuzz/run.sh all -max_total_time=60
#
# More arguments go to libFuzzer. Needs a C++ compiler, and root for the targets `xfs_image`, `xfs_log` and `repair`,
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
# With a target of its own the flags are not for build scripts.
host=$(rustc -vV | sed -n 's/^host: //p')
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$here/target}

build() {
  # What `cargo fuzz` asks of the compiler, less the sanitizers, for which it takes a nightly one.
  local f flags=(-Cpasses=sancov-module -Cdebug-assertions -Coverflow-checks)
  for f in level=4 inline-8bit-counters pc-table trace-compares; do
    flags+=("-Cllvm-args=-sanitizer-coverage-$f")
  done
  RUSTFLAGS="${flags[*]}" cargo build --quiet --locked --release --manifest-path "$here/Cargo.toml" \
    --target "$host" "$@"
}

if [ "$target" = all ]; then
  build --bins
  # What a target says is shown whole if it fails, and else its end.
  one='name=$(basename "$0" .rs); log=$1/$name.log; run=$2; shift 2
    if "$run" "$name" "$@" >"$log" 2>&1; then tail -n 1 "$log" | sed "s/^/$name: /"; else cat "$log"; exit 1; fi'
  printf '%s\0' "$here"/fuzz_targets/*.rs |
    xargs -0 -P "$(nproc)" -I '{}' bash -c "$one" '{}' "$dir" "$here/run.sh" "$@"
  exit
fi

build --bin "$target"
case $target in
xfs_image | xfs_log | repair)
  if [ -z "${UVFS_FUZZ_IMAGE:-}" ]; then
    if [ "$target" = xfs_log ]; then export CUT=1; fi
    sh "$here/image.sh" "$dir/image"
    export UVFS_FUZZ_IMAGE=$dir/image
  fi
  ;;
esac
mkdir -p "$here/corpus/$target" "$here/artifacts/$target" "$here/seeds/$target"
cd "$here/.."
# Inputs are of any length from the start: a header alone has 40 bytes.
"$CARGO_TARGET_DIR/$host/release/$target" -timeout=60 -max_len=256 -len_control=0 \
  -artifact_prefix="$here/artifacts/$target/" "$@" "$here/corpus/$target" "$here/seeds/$target"
