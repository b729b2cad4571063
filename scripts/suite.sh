#!/usr/bin/env bash
# Runs make targets one after the other as stages, stops at the first failure, and ends with a table of stage times and
# one line that counts the tests. A stage of tests that fails runs once more: real clusters, kernels and clocks fail now and then,
# and one such failure must not hide the results of all later stages. The end of the output names every test that needed it: each
# is a bug to repair.
# Usage: scripts/suite.sh TARGET…
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
: "${S3CSI_LOG_DIR:?is set by the Makefile; run this through make}"

# Logs of an earlier run must not be counted or searched. The marker file, or the path of our own cache, shows that the directory
# may be emptied, whatever the variable is set to. (A single stage leaves logs without the marker.)
readonly MARK=.s3csi-logs
start_with_empty_logs() {
  mkdir -p "$S3CSI_LOG_DIR"
  if [[ -n $(ls -A "$S3CSI_LOG_DIR") && ! -e $S3CSI_LOG_DIR/$MARK && $S3CSI_LOG_DIR != */s3csi/logs ]]; then
    fail "$S3CSI_LOG_DIR (S3CSI_LOG_DIR) contains files that are not logs of this suite; choose another directory"
  fi
  find "$S3CSI_LOG_DIR" -mindepth 1 -delete
  mkdir "$S3CSI_LOG_DIR/stages"
  touch "$S3CSI_LOG_DIR/$MARK"
}

print_times() {
  printf '\n%-20s %9s  %s\n' stage seconds outcome
  awk -F '\t' '
    { printf "%-20s %9.1f  %s\n", $1, $2, $3; total += $2 }
    END { printf "%-20s %9.1f\n", "total", total }
  ' "$S3CSI_LOG_DIR/stages/times"
}

# Sums the result lines of all test programs, without colours.
print_counts() {
  sed 's/\x1b\[[0-9;]*m//g' "$S3CSI_LOG_DIR"/stages/*.log | awk '
    /^test result: / {
      for (i = 2; i <= NF; i++) {
        if ($i == "passed;") passed += $(i - 1)
        if ($i == "failed;") failed += $(i - 1)
      }
    }
    END { printf "%d passed, %d failed\n", passed, failed }
  '
}

# Runs a stage. IN_SUITE: later stages skip the build, an earlier stage has done it.
run_stage() {
  scripts/stage.sh "$1" make --no-print-directory IN_SUITE=yes "$1"
}

# Runs a failed stage of tests again, and keeps the output of the first attempt.
run_stage_again() {
  local target=$1 first=$S3CSI_LOG_DIR/stages/$1.first-attempt
  [[ $target == test-* && $target != test-logs && $target != test-leftovers ]] || return 1
  mv "$S3CSI_LOG_DIR/stages/$target.log" "$first"
  echo "$target failed and runs again; the output of the first attempt: $first"
  run_stage "$target"
}

print_flaky_tests() {
  local log
  for log in "$S3CSI_LOG_DIR"/stages/*.first-attempt; do
    [[ -e $log ]] || continue
    printf '\nFLAKY: %s failed at its first attempt; its output: %s\n' "$(basename "$log" .first-attempt)" "$log"
    sed 's/\x1b\[[0-9;]*m//g' "$log" | awk '/^test .* \.\.\. FAILED$/ { print "  " $2 }'
  done
}

start_with_empty_logs
scripts/leftovers.sh record
status=0
for target in "$@"; do
  run_stage "$target" || run_stage_again "$target" || { status=$? && break; }
done
print_times
if ((status != 0)); then
  printf '\n%s failed; its output: %s\n' "$target" "$S3CSI_LOG_DIR/stages/$target.log"
fi
print_flaky_tests
print_counts
exit "$status"
