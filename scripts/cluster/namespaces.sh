# shellcheck shell=bash
# Sourced by the scripts of the test cluster: prepares namespaces so that a kubelet or a systemd in them finds a complete machine,
# without effect on the real one.

# The cgroup hierarchies this process is in, one per line: controllers (`unified` for version 2), mount point, own directory.
own_cgroups() {
  local controllers path mount
  while IFS=: read -r _ controllers path; do
    if [[ -z $controllers ]]; then
      mount=$(findmnt --noheadings --raw --output TARGET --types cgroup2 | head -n 1)
    else
      mount=$(findmnt --noheadings --raw --output TARGET --types cgroup --options "$controllers" | head -n 1)
    fi || true
    [[ -z $mount ]] || echo "${controllers:-unified} $mount $mount${path%/}"
  done </proc/self/cgroup
}

# enter_cgroup NAME: moves this shell into a child of its cgroup, in every hierarchy.
enter_cgroup() {
  local controllers own file
  while read -r controllers _ own; do
    mkdir -p "$own/$1"
    if [[ $controllers == cpuset ]]; then
      # A new child has no CPUs and no memory nodes; processes cannot be moved into it before both are set.
      for file in cpuset.cpus cpuset.mems; do cat "$own/$file" >"$own/$1/$file"; done
    fi
    echo "$BASHPID" >"$own/$1/cgroup.procs"
  done < <(own_cgroups)
}

# remove_cgroup DIRECTORY: with its children, once its processes are dead.
remove_cgroup() {
  local try
  for ((try = 0; try < 50; try++)); do
    [[ -d $1 ]] || return 0
    find "$1" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.05
  done
  say "cannot remove the cgroup $1"
}

# Mounts a sysfs of the new network namespace, and the machine's cgroup layout rooted at our own cgroups. The old tree is
# unmounted first, or every hierarchy would be in the mount table twice.
mount_sysfs_and_cgroups() {
  local hierarchies controllers mount point
  hierarchies=$(own_cgroups)
  umount --recursive --lazy /sys
  mount -t sysfs sysfs /sys
  mount -t fusectl fusectl /sys/fs/fuse/connections 2>/dev/null || true
  if [[ $(wc -l <<<"$hierarchies") == 1 ]]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    return
  fi
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  while read -r controllers mount _; do
    point=/sys/fs/cgroup/${mount##*/}
    mkdir -p "$point"
    case $controllers in
      unified) mount -t cgroup2 cgroup2 "$point" ;;
      name=*) mount -t cgroup -o "none,$controllers" cgroup "$point" ;;
      *) mount -t cgroup -o "$controllers" cgroup "$point" ;;
    esac
  done <<<"$hierarchies"
}

# Kernel settings belong to the machine and stay read-only; those of the network namespace are writable.
protect_sysctls() {
  mount --bind /proc/sys /proc/sys
  mount --bind /proc/sys/net /proc/sys/net
  mount -o remount,bind,ro /proc/sys
}

# init_below PID: the child of `unshare` that is PID 1 of the new namespace, and not a program its shell has just run.
init_below() {
  local try child children=()
  for ((try = 0; try < 500; try++)); do
    read -r -a children 2>/dev/null <"/proc/$1/task/$1/children" || true
    for child in "${children[@]}"; do
      if [[ $(awk '/^NSpid:/ { print $NF }' "/proc/$child/status" 2>/dev/null) == 1 ]]; then
        echo "$child"
        return
      fi
    done
    sleep 0.01
  done
  fail "no PID 1 appeared in the new namespaces"
}
