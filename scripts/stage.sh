#!/usr/bin/env bash
# Runs one named stage: a header before, the duration after, the whole output kept in $S3CSI_LOG_DIR/stages/NAME.log and
# the outcome added to $S3CSI_LOG_DIR/stages/times, from which scripts/suite.sh prints its table.
# Usage: scripts/stage.sh NAME command arguments…
set -euo pipefail
: "${S3CSI_LOG_DIR:?is set by the Makefile; run this through make}"

readonly name=$1
shift
readonly directory=$S3CSI_LOG_DIR/stages
mkdir -p "$directory"

printf '\n━━ %s ━━\n' "$name"
started=$(date +%s%N)
status=0
"$@" 2>&1 | tee "$directory/$name.log" || status=$?
milliseconds=$((($(date +%s%N) - started) / 1000000))
seconds=$(printf '%d.%d' $((milliseconds / 1000)) $((milliseconds % 1000 / 100)))

if ((status == 0)); then outcome=ok; else outcome=FAILED; fi
printf '%s\t%s\t%s\n' "$name" "$seconds" "$outcome" >>"$directory/times"
printf '━━ %s: %s after %s s\n' "$name" "$outcome" "$seconds"
exit "$status"
