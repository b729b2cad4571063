#!/usr/bin/env bash
# Checks that the suite cleaned up: no process of ours, FUSE mount, cgroup or temporary directory exists that did not exist before.
# Each test's fixture checks its own; this finds what no fixture covers.
# Usage: scripts/leftovers.sh record | check
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
: "${S3CSI_LOG_DIR:?is set by the Makefile; run this through make}"
: "${CARGO_TARGET_DIR:?is set by the Makefile; run this through make}"
: "${S3CSI_TOOLS:?is set by the Makefile; run this through make}"

readonly BEFORE=$S3CSI_LOG_DIR/stages/before
# A process disappears a moment after its parent has reaped it.
readonly PATIENCE_SECONDS=5

present() {
  local process program
  for process in /proc/[0-9]*; do
    program=$(readlink "$process/exe" 2>/dev/null) || continue
    # A rebuilt program file does not make it another process.
    program=${program% (deleted)}
    case $program in
      "$CARGO_TARGET_DIR"/*/mount-s3* | "$CARGO_TARGET_DIR"/*/s3csi* | "$(readlink -f "$S3CSI_TOOLS/..")"/*)
        echo "process ${process#/proc/}: $program"
        ;;
    esac
  done
  awk '$3 ~ /^fuse/ && $1 == "mountpoint-s3" { print "mount " $2 }' /proc/mounts
  find /sys/fs/cgroup -type d -name 's3csi-[0-9]*' -prune -printf 'cgroup %p\n' 2>/dev/null || true
  find /tmp -maxdepth 1 \( -name 's3csi-*' -o -name 'systemd-beside.*' \) -printf 'directory %p\n'
}

case ${1:-} in
  record) present | sort >"$BEFORE" ;;
  check)
    [[ -e $BEFORE ]] || fail "the state before the tests is unknown; run: make test"
    for ((second = 0; second < PATIENCE_SECONDS; second++)); do
      left=$(comm -13 "$BEFORE" <(present | sort))
      [[ -n $left ]] || break
      sleep 1
    done
    [[ -z $left ]] || fail "the suite left this behind:"$'\n'"$left"
    say "nothing was left behind"
    ;;
  *) fail "usage: scripts/leftovers.sh record | check" ;;
esac
