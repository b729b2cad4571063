# shellcheck shell=bash
# Sourced by the other scripts: how they talk while they work. Nothing here touches the machine.

# One line that says which script speaks.
say() {
  printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2
}

fail() {
  say "error: $*"
  exit 1
}

# Runs a command that is long and of no interest unless it fails: says what is going on, says every 15 seconds that it
# still is, and shows the end of the command's output only after a failure.
# Usage: narrated "what is going on" command arguments…
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
