#!/usr/bin/env bash
# Runs a command next to a real systemd: a system manager as PID 1 of new namespaces (processes, mounts, cgroups, host name,
# IPC), on this machine's files. The command runs in the same namespaces and finds /run/systemd/private, terminals and FUSE mounts
# in place. Its exit status is passed on. Nothing outlives this script, even if it is killed: the kernel ends all processes of the
# namespace with its PID 1.
# Usage: scripts/with-systemd.sh command arguments…
#   SYSTEMD_ROOT  another root directory, for another version of systemd; it shares /tmp, $SYSTEMD_SHARE and the working directory
#   SYSTEMD_LOG   a file for systemd's log, in place of the journal
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
# shellcheck source=scripts/narrate.sh
source "$here/narrate.sh"

(($# > 0)) || fail "usage: scripts/with-systemd.sh command arguments…"
((EUID == 0)) || fail "starting systemd needs root; run this as root"
root=${SYSTEMD_ROOT:-}
init=/lib/systemd/systemd
[[ -x $root$init ]] || fail "there is no $root$init; run: apt-get install systemd"
cgroups=$(findmnt --noheadings --output TARGET --types cgroup2 | head -n 1)
[[ -n $cgroups ]] || fail "no cgroup2 file system is mounted here"

work=$(mktemp --directory /tmp/systemd-beside.XXXXXX)
cgroup=$cgroups/${work##*/}
log=${SYSTEMD_LOG:-$work/systemd.log}
outer='' manager=''

# shellcheck disable=SC2317 # it is reached, by the trap
clean_up() {
  set +e
  trap - EXIT
  # The kernel ends everything in the PID namespace with the manager.
  if [[ -n $manager ]]; then kill -KILL "$manager"; elif [[ -n $outer ]]; then kill -KILL "$outer"; fi 2>/dev/null
  [[ -z $outer ]] || wait "$outer" 2>/dev/null
  for ((try = 0; try < 50; try++)); do
    find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null
    [[ -d $cgroup ]] || break
    sleep 0.1
  done
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

mkdir "$cgroup" "$work/units"
: >"$log"
# The smallest set of units that a transient service needs; no unit of this machine is started.
for target in sysinit basic shutdown; do
  printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' "$target" >"$work/units/$target.target"
done
printf 'Requires=sysinit.target\nAfter=sysinit.target\n' >>"$work/units/basic.target"

# Runs as PID 1 before it executes systemd. The unit path must contain /run/systemd/transient, or a daemon-reload forgets all
# units.
cat >"$work/init" <<INIT
#!/usr/bin/env bash
set -euo pipefail
if [[ -n "$root" ]]; then
  mount --bind "$root" "$root"
  mount --rbind /dev "$root/dev"
  mount --rbind /sys "$root/sys"
  mount -t proc proc "$root/proc"
  for shared in /tmp "$PWD" ${SYSTEMD_SHARE:-}; do
    mkdir -p "$root\$shared"
    mount --bind "\$shared" "$root\$shared"
  done
  cd "$root"
  pivot_root . mnt
  umount -l /mnt
  cd /
fi
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/systemd
# Only cgroup v2, and only our own subtree.
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# systemd must not change this machine's settings, and logs to our file instead of the kernel log.
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount --bind "$log" /dev/kmsg
mount --bind /dev/null /dev/console
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin container=s3csi \\
  SYSTEMD_LOG_TARGET=kmsg SYSTEMD_LOG_LEVEL=info SYSTEMD_UNIT_PATH="/run/systemd/transient:$work/units" \\
  SYSTEMD_GENERATOR_PATH="$work/none" SYSTEMD_ENVIRONMENT_GENERATOR_PATH="$work/none" \\
  $init --system --unit=basic.target --show-status=no
INIT
chmod +x "$work/init"

# Its own cgroup first: systemd takes over every process of its cgroup.
(
  echo "$BASHPID" >"$cgroup/cgroup.procs"
  exec setsid setpriv --pdeathsig KILL unshare --mount --propagation private --pid --fork --kill-child=KILL --mount-proc \
    --cgroup --uts --ipc "$work/init" </dev/null >>"$log" 2>&1
) &
outer=$!

is_up=
for ((try = 0; try < 500; try++)); do
  read -r manager _ 2>/dev/null <"/proc/$outer/task/$outer/children" || true
  if [[ -n $manager && $(nsenter -t "$manager" -m -p systemctl is-active basic.target 2>/dev/null) == active ]]; then
    is_up=yes
    break
  fi
  kill -0 "$outer" 2>/dev/null || break
  sleep 0.02
done
if [[ -z $is_up ]]; then
  cat "$log" >&2
  fail "systemd did not start"
fi

status=0
S3CSI_BESIDE_SYSTEMD=yes nsenter -t "$manager" -m -p -C --wd="$PWD" -- "$@" || status=$?
exit "$status"
