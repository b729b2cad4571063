#!/usr/bin/env bash
# Proves that the suite cleaned up behind itself: no process of ours, FUSE mount, cgroup or temporary directory is there that was
# not there before it. (Each test's fixture looks for its own; this finds what no fixture felt responsible for.)
# Usage: scripts/leftovers.sh record | check
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
: "${S3CSI_LOG_DIR:?is set by the Makefile; run this through make}"
: "${CARGO_TARGET_DIR:?is set by the Makefile; run this through make}"
: "${S3CSI_TOOLS:?is set by the Makefile; run this through make}"

readonly BEFORE=$S3CSI_LOG_DIR/stages/before
# The end of a process is seen a moment after its parent saw it.
readonly PATIENCE_SECONDS=5

present() {
  local process program
  for process in /proc/[0-9]*; do
    program=$(readlink "$process/exe" 2>/dev/null) || continue
    # A program that was built anew meanwhile is the same process as before.
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
    [[ -e $BEFORE ]] || fail "only \`make test\` knows what was there before; run that"
    for ((second = 0; second < PATIENCE_SECONDS; second++)); do
      left=$(comm -13 "$BEFORE" <(present | sort))
      [[ -n $left ]] || break
      sleep 1
    done
    [[ -z $left ]] || fail "the suite left something behind:"$'\n'"$left"
    say "nothing is left behind"
    ;;
  *) fail "usage: scripts/leftovers.sh record | check" ;;
esac
