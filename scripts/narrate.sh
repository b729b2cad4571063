# shellcheck shell=bash
# Sourced by the other scripts: functions for progress messages and errors.

# Prints one line, prefixed with the name of the script.
say() {
  printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2
}

fail() {
  say "error: $*"
  exit 1
}

# Runs a long command: prints what it does, the elapsed time every 15 seconds, and the end of its output only if it fails.
# Usage: narrated "description" command arguments…
narrated() {
  local what=$1 started=$SECONDS output pid status=0 elapsed
  shift
  output=$(mktemp)
  say "$what"
  "$@" >"$output" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    elapsed=$((SECONDS - started))
    if ((elapsed > 0 && elapsed % 15 == 0)); then
      say "  … $elapsed s"
    fi
  done
  wait "$pid" || status=$?
  if ((status != 0)); then
    tail -n 40 "$output" >&2
    say "  failed after $((SECONDS - started)) s with exit status $status"
  else
    say "  done in $((SECONDS - started)) s"
  fi
  rm -f "$output"
  return "$status"
}
