#!/usr/bin/env bash
# A real Kubernetes cluster (etcd, API server, controller manager, scheduler; nodes with systemd, containerd and kubelet)
# and an S3 server, in namespaces of this machine. Only its directory and its cgroups are visible outside, and all its processes end
# with the first of them. Pods reach the S3 server at http://10.200.0.1:7070.
#
#   cluster.sh up DIRECTORY [NODES]          boot; returns when Pods can be created
#   cluster.sh hold DIRECTORY [NODES]        the same, prints `ready`, and removes it when standard input ends
#   cluster.sh down DIRECTORY
#   cluster.sh kubectl DIRECTORY ARGUMENTS…  as the cluster's administrator
#   cluster.sh on DIRECTORY cp|nodeN COMMAND…
#   cluster.sh load DIRECTORY IMAGE.tar…     into every node
#   cluster.sh helm DIRECTORY ARGUMENTS…     as the cluster's administrator
#   cluster.sh install DIRECTORY [NAMESPACE DRIVER-NAME [HELM-ARGUMENTS…]]
#                                            the chart as release `s3csi`, with the keys of the S3 server; load the image first
#   cluster.sh service DIRECTORY cp|nodeN start|stop|restart|kill NAME
#                                            cp: etcd apiserver controller-manager scheduler versitygw; nodeN: containerd kubelet
#   cluster.sh kill-node | start-node DIRECTORY NUMBER
#
# Environment: S3CSI_TOOLS (where kube, versitygw and helm are), CLUSTER_LOGS (default DIRECTORY/logs)
set -euo pipefail
self=$(readlink -f "$0") here=$(dirname "$(readlink -f "$0")")
readonly self here
# shellcheck source=scripts/narrate.sh
source "$here/narrate.sh"
# shellcheck source=scripts/cluster/namespaces.sh
source "$here/cluster/namespaces.sh"
# shellcheck source=scripts/oci.sh
source "$here/oci.sh"

readonly TOOLS=${S3CSI_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/tools/bin}
# A well-known key of this disposable server; its value lets a search through all logs find it if it is printed.
readonly S3_ACCESS_KEY=testbed S3_SECRET_KEY=testbed-NeverPrintThis
readonly S3_ENDPOINT=http://10.200.0.1:7070

readonly NEW_NAMESPACES=(unshare --mount --propagation private --pid --fork --kill-child=KILL --mount-proc --net --uts --ipc --cgroup)

check_machine() {
  local program missing=()
  [[ -x $TOOLS/kube ]] || fail "there is no $TOOLS/kube; run: make kube"
  [[ -x $TOOLS/versitygw ]] || fail "there is no $TOOLS/versitygw; run: make tools"
  [[ -c /dev/fuse ]] || fail "/dev/fuse is missing; load the kernel module: modprobe fuse"
  for program in containerd ctr runc ip iptables busybox /lib/systemd/systemd /usr/lib/cni/bridge; do
    command -v "$program" >/dev/null || missing+=("$program")
  done
  ((${#missing[@]} == 0)) || fail "not installed: ${missing[*]}; run: make setup"
}

# ---- Where things are

first_process() {
  cat "$DIRECTORY/$1/pid" 2>/dev/null || fail "$1 does not run; is there a cluster in $DIRECTORY?"
}

# cgroups_of cp|nodeN: one directory per hierarchy, below the cgroups that the cluster was started in.
cgroups_of() {
  if [[ $1 == cp ]]; then cat "$DIRECTORY/cgroups"; else sed "s|\$|/$1|" "$DIRECTORY/cgroups"; fi
}

# inside cp|nodeN COMMAND…: joins the cgroups first, because entering their namespace does not move the process.
inside() (
  where=$1
  shift
  process=$(first_process "$where")
  while read -r cgroup; do echo "$BASHPID" >"$cgroup/cgroup.procs"; done < <(cgroups_of "$where")
  exec nsenter --target "$process" --mount --pid --net --uts --ipc --cgroup --wd=/ -- "$@"
)

kubectl() {
  KUBECONFIG=$DIRECTORY/pki/admin.kubeconfig KUBECACHEDIR=$DIRECTORY/kubectl-cache \
    nsenter --target "$(first_process cp)" --net -- "$TOOLS/kube" kubectl "$@"
}

helm() {
  [[ -x $TOOLS/helm ]] || fail "there is no $TOOLS/helm; run: make tools"
  KUBECONFIG=$DIRECTORY/pki/admin.kubeconfig HOME=$DIRECTORY/helm \
    nsenter --target "$(first_process cp)" --net -- "$TOOLS/helm" "$@"
}

# wait_for_file FILE LOG WHAT
wait_for_file() {
  local try
  for ((try = 0; try < 1500; try++)); do
    [[ ! -e $1 ]] || return 0
    sleep 0.02
  done
  cat "$2" >&2
  fail "$3 did not start"
}

# ---- Up

make_certificates() {
  local number names=()
  for ((number = 1; number <= 9; number++)); do names+=("node$number=10.200.0.$((10 + number))"); done
  "$TOOLS/kube" pki "$DIRECTORY/pki" https://10.200.0.1:443 "${names[@]}"
}

# The image of workloads, a shell, and the pause image.
make_images() {
  local applet root=$DIRECTORY/images/busybox
  mkdir -p "$root"/{bin,etc,root,run,var,mnt,tmp,usr}
  chmod 1777 "$root/tmp"
  cp "$(command -v busybox)" "$root/bin/busybox"
  for applet in $(busybox --list); do
    [[ $applet == busybox ]] || ln -s busybox "$root/bin/$applet"
  done
  ln -s ../bin "$root/usr/bin"
  printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$root/etc/passwd"
  printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
  # The second name is how kubelet resolves `busybox:1` in the examples of the documentation.
  oci_image "$root.tar" localhost/busybox:1 "$root" '"Cmd":["/bin/sh"],"Env":["PATH=/bin"]' >/dev/null
  oci_image "$DIRECTORY/images/busybox-1.tar" docker.io/library/busybox:1 "$root" '"Cmd":["/bin/sh"],"Env":["PATH=/bin"]' >/dev/null
  oci_image "$DIRECTORY/images/pause.tar" localhost/pause:1 "$root" '"Entrypoint":["/bin/sleep","2147483647"]' >/dev/null
}

start_control_plane() {
  local init=() id
  id=s3csi-$(printf %s "$DIRECTORY" | cksum | cut -d ' ' -f 1)
  own_cgroups | awk -v id="$id" '{ print $3 "/" id }' >"$DIRECTORY/cgroups"
  mkdir -p "$DIRECTORY"/cp/{run,certificates}
  rm -f "$DIRECTORY/cp/run/"*
  # With `hold`, everything ends with this script, even if the script is killed.
  [[ $1 == up ]] || init=(setpriv --pdeathsig KILL)
  (
    enter_cgroup "$id"
    export ROOT_ACCESS_KEY=$S3_ACCESS_KEY ROOT_SECRET_KEY=$S3_SECRET_KEY
    exec setsid "${init[@]}" "${NEW_NAMESPACES[@]}" "$here/cluster/control-plane.sh" "$DIRECTORY" "$TOOLS/kube" "$TOOLS/versitygw"
  ) </dev/null >>"$DIRECTORY/logs/control-plane.log" 2>&1 &
  init_below $! >"$DIRECTORY/cp/pid"
  wait_for_file "$DIRECTORY/cp/run/started" "$DIRECTORY/logs/control-plane.log" "the control plane"
}

# Started from inside the outer namespaces, so that it ends with them. Its first process has to be found from here: the one whose
# PIDs in the innermost two namespaces are those recorded inside.
start_node() {
  local number=$1 own=$DIRECTORY/node$1 process numbers
  mkdir -p "$own"/{run,certificates}
  rm -f "$own/run/"* "$own/pid"
  inside cp "$self" _spawn-node "$DIRECTORY" "$number" </dev/null >>"$DIRECTORY/logs/node$number.log" 2>&1 9>&- ||
    fail "$(cat "$DIRECTORY/logs/node$number.log")"
  wait_for_file "$own/run/started" "$DIRECTORY/logs/node$number.log" "node$number"
  numbers="$(cat "$own/run/init.pid") 1"
  for process in /proc/[0-9]*; do
    if [[ $(awk '/^NSpid:/ { print $(NF - 1), $NF }' "$process/status" 2>/dev/null) == "$numbers" &&
      $(readlink "$process/ns/pid" 2>/dev/null) == "$(cat "$own/run/init.namespace")" ]]; then
      echo "${process#/proc/}" >"$own/pid"
    fi
  done
  [[ -s $own/pid ]] || fail "node$number has no first process"
}

# In the outer namespaces: creates the node's namespaces below them, and a veth pair between the two.
spawn_node() {
  local number=$1 own=$DIRECTORY/node$1 init
  (
    enter_cgroup "node$number"
    exec setsid "${NEW_NAMESPACES[@]}" "$here/cluster/node.sh" "$DIRECTORY" "$number" "$TOOLS/kube"
  ) </dev/null >>"$DIRECTORY/logs/node$number.log" 2>&1 &
  init=$(init_below $!)
  echo "$init" >"$own/run/init.pid"
  readlink "/proc/$init/ns/pid" >"$own/run/init.namespace"
  ip link add "to-node$number" type veth peer name eth0 address "02:00:00:00:00:0$number" netns "$init"
  ip link set "to-node$number" master nodes up
  ip route replace "10.244.$number.0/24" via "10.200.0.$((10 + number))"
}

# A Ready node is not enough: Pods are rejected until their service account exists.
wait_until_usable() {
  local nodes=$1 started=$SECONDS
  while ((SECONDS - started < 180)); do
    if [[ $(kubectl get nodes --no-headers 2>/dev/null | awk '$2 == "Ready"' | wc -l) -ge $nodes ]] &&
      kubectl get serviceaccount default >/dev/null 2>&1; then
      return
    fi
    sleep 0.2
  done
  kubectl get nodes >&2 || true
  fail "the nodes are not ready after three minutes; logs: $DIRECTORY/logs"
}

up() {
  local how=$1 nodes=$2 number pid pids=() started=$SECONDS
  check_machine
  sweep
  mkdir -p "$DIRECTORY"
  # The cluster's processes inherit the lock: while it is held, the cluster runs.
  exec 9>"$DIRECTORY/lock"
  flock --nonblock 9 || fail "a cluster already runs in $DIRECTORY; remove it first: $0 down $DIRECTORY"
  if [[ -n ${CLUSTER_LOGS:-} ]]; then
    mkdir -p "$CLUSTER_LOGS"
    ln -sfnT "$CLUSTER_LOGS" "$DIRECTORY/logs"
  else
    mkdir -p "$DIRECTORY/logs"
  fi
  make_certificates
  make_images
  say "starting the control plane"
  start_control_plane "$how"
  say "starting $nodes node(s)"
  for ((number = 1; number <= nodes; number++)); do
    start_node "$number" &
    pids+=($!)
  done
  # No bare wait: the control plane is also a child, and does not end.
  for pid in "${pids[@]}"; do wait "$pid" || fail "a node did not start; logs: $DIRECTORY/logs"; done
  say "waiting until the nodes are ready"
  wait_until_usable "$nodes"
  printf '#!/bin/sh\nexec %q kubectl %q "$@"\n' "$self" "$DIRECTORY" >"$DIRECTORY/kubectl"
  chmod +x "$DIRECTORY/kubectl"
  say "up after $((SECONDS - started)) s; try: $DIRECTORY/kubectl get pods --all-namespaces"
}

# ---- Down

down() {
  local first try
  first=$(cat "$DIRECTORY/cp/pid" 2>/dev/null) || true
  # The PID may have been reused.
  if [[ -n $first ]] && tr '\0' ' ' 2>/dev/null <"/proc/$first/cmdline" | grep --quiet --fixed-strings "control-plane.sh $DIRECTORY "; then
    # The kernel ends all processes of the namespace, and of those below, with the first process.
    kill -KILL "$first"
    for ((try = 0; try < 500; try++)); do
      [[ -e /proc/$first ]] || break
      sleep 0.02
    done
  fi
  remove_cgroups_of cp
  rm -rf "$DIRECTORY"
}

remove_cgroups_of() {
  local cgroup
  [[ -e $DIRECTORY/cgroups ]] || return 0
  while read -r cgroup; do remove_cgroup "$cgroup"; done < <(cgroups_of "$1")
}

# Removes remains of clusters whose owners were killed.
sweep() {
  local lock
  for lock in /tmp/s3csi-cluster-*/lock; do
    [[ -e $lock ]] || continue
    if flock --nonblock "$lock" true; then
      say "removing the remains of $(dirname "$lock")"
      "$self" down "$(dirname "$lock")"
    fi
  done
}

hold() {
  trap down EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  up hold "$1"
  echo ready
  # Returns when the owner closes the other end or dies. Without the lock, because this may briefly outlive the cluster.
  cat >/dev/null 9>&-
}

# ---- Parts

service() {
  local where=$1 action=$2 name=$3 run=$DIRECTORY/$1/run
  case $where:$action in
    node*:kill) inside "$where" systemctl kill --kill-whom main --signal KILL "$name" ;;
    node*) inside "$where" systemctl "$action" "$name" ;;
    cp:start) rm -f "$run/$name.down" ;;
    cp:stop)
      : >"$run/$name.down"
      inside cp kill -TERM "$(cat "$run/$name.pid")"
      ;;
    cp:restart) inside cp kill -TERM "$(cat "$run/$name.pid")" ;;
    cp:kill) inside cp kill -KILL "$(cat "$run/$name.pid")" ;;
    *) fail "unknown: service $where $action $name" ;;
  esac
}

kill_node() {
  local first try
  first=$(first_process "node$1")
  kill -KILL "$first"
  rm -f "$DIRECTORY/node$1/pid"
  for ((try = 0; try < 500; try++)); do
    [[ -e /proc/$first/ns/pid ]] || break
    sleep 0.02
  done
  # Remove the cgroups of the dead node: each remaining one delays the next kubelet by three seconds.
  remove_cgroups_of "node$1"
}

load() {
  local image own
  for image in "$@"; do
    say "loading $(basename "$image") into the nodes"
    for own in "$DIRECTORY"/node*/pid; do
      inside "$(basename "$(dirname "$own")")" "$here/cluster/load-images.sh" "$(readlink -f "$image")"
    done
  done
}

# install_driver NAMESPACE DRIVER-NAME HELM-ARGUMENTS…
install_driver() {
  local namespace=$1 driver=$2 part
  shift 2
  say "installing the driver $driver with Helm into namespace $namespace"
  kubectl get namespace "$namespace" >/dev/null 2>&1 || kubectl create namespace "$namespace" >&2
  kubectl apply --filename - >&2 <<KEYS
apiVersion: v1
kind: Secret
metadata: {name: s3-secret, namespace: $namespace}
stringData: {access_key_id: $S3_ACCESS_KEY, secret_access_key: $S3_SECRET_KEY}
KEYS
  helm upgrade --install s3csi "$here/../charts/s3csi" --namespace "$namespace" --set driverName="$driver" \
    --set image.repository=localhost/s3csi --set image.tag=test --set image.pullPolicy=Never \
    --set s3.endpointUrl="$S3_ENDPOINT" "$@" >&2
  say "waiting until its Pods are ready"
  for part in daemonset/s3-csi-node deployment/s3-csi-controller daemonset/s3-csi-mounter; do
    [[ -z $(kubectl get --namespace "$namespace" "$part" --ignore-not-found --output name) ]] ||
      kubectl rollout status --namespace "$namespace" "$part" --timeout 120s >&2
  done
  wait_for_registration "$driver" ||
    fail "kubelet does not know the driver after 30 s; try: $self kubectl $DIRECTORY logs --namespace $namespace daemonset/s3-csi-node"
}

# A Pod created before kubelet knows the driver would wait for kubelet's back-off.
wait_for_registration() {
  local try registered nodes
  for ((try = 0; try < 150; try++)); do
    registered=$(kubectl get csinodes --output jsonpath='{range .items[*].spec.drivers[*]}{.name}{"\n"}{end}' | grep --count --line-regexp --fixed-strings "$1") || true
    nodes=$(kubectl get nodes --output name | wc -l)
    ((registered < nodes)) || return 0
    sleep 0.2
  done
  return 1
}

(($# >= 2)) || fail "usage: $(awk '/^#   cluster/ { print substr($0, 5) }' "$0")"
readonly COMMAND=$1
((EUID == 0)) || fail "namespaces and mounts need root; run this as root"
DIRECTORY=$(realpath --canonicalize-missing "$2")
shift 2
case $COMMAND in
  up) up up "${1:-1}" ;;
  hold) hold "${1:-1}" ;;
  down) down ;;
  kubectl) kubectl "$@" ;;
  on) inside "$@" ;;
  load) load "$@" ;;
  helm) helm "$@" ;;
  install) install_driver "${1:-kube-system}" "${2:-s3.csi.scality.com}" "${@:3}" ;;
  service) service "$@" ;;
  kill-node) kill_node "$1" ;;
  start-node) start_node "$1" ;;
  _spawn-node) spawn_node "$1" ;;
  *) fail "unknown command: $COMMAND" ;;
esac
