#!/usr/bin/env bash
# PID 1 of a node's namespaces until it executes systemd: builds a node from this machine's own files, with containerd and kubelet
# as services of systemd. Only scripts/cluster.sh starts this.
# Usage: node.sh DIRECTORY NUMBER KUBE-PROGRAM
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
# shellcheck source=scripts/narrate.sh
source "$here/../narrate.sh"
# shellcheck source=scripts/cluster/namespaces.sh
source "$here/namespaces.sh"

readonly DIRECTORY=$1 NUMBER=$2 KUBE=$3
readonly NAME=node$NUMBER OWN=$DIRECTORY/node$NUMBER LOGS=$DIRECTORY/logs PKI=$DIRECTORY/pki
readonly ADDRESS=10.200.0.$((10 + NUMBER)) UNITS=$OWN/units

# kubelet would write these settings of the whole kernel. Bind mounts show it the values it wants; the machine keeps its own.
show_sysctls() {
  local key value
  mkdir -p "$OWN/sysctl"
  while read -r key value; do
    echo "$value" >"$OWN/sysctl/${key//\//.}"
    mount --bind "$OWN/sysctl/${key//\//.}" "/proc/sys/$key"
  done <<SYSCTLS
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
SYSCTLS
}

# The machine's root directory with separate /run, /etc and /var, so that every path is where it is on other nodes.
mount_files() {
  local name
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir -p /run/lock /run/systemd /run/containerd
  for name in etc var; do
    mkdir -p "$OWN/$name.upper" "$OWN/$name.work"
    mount -t overlay -o "lowerdir=/$name,upperdir=$OWN/$name.upper,workdir=$OWN/$name.work" overlay "/$name"
  done
  # overlayfs cannot be stacked on another overlayfs for image layers.
  for name in kubelet containerd; do
    mkdir -p "/var/lib/$name" "$OWN/$name"
    mount --bind "$OWN/$name" "/var/lib/$name"
  done
  mkdir -p /var/lib/cni /var/log/pods /etc/cni/net.d "$LOGS/$NAME-pods"
  # Logs of Pods are kept with all other logs, and searched for secrets like them.
  mount --bind "$LOGS/$NAME-pods" /var/log/pods
  # Shared propagation, as systemd sets it on any node: mounts of Pods are visible on the node and in other Pods.
  mount --make-rshared /
}

connect() {
  local try other
  ip link set lo up
  echo 1 >/proc/sys/net/ipv4/ip_forward
  # The creator of these namespaces adds the other end of the veth pair.
  for ((try = 0; try < 500; try++)); do
    [[ ! -e /sys/class/net/eth0 ]] || break
    sleep 0.02
  done
  ip address add "$ADDRESS/16" dev eth0
  ip link set eth0 up
  ip route add default via 10.200.0.1
  for ((other = 1; other <= 9; other++)); do
    ((other == NUMBER)) || ip route add "10.244.$other.0/24" via "10.200.0.$((10 + other))"
  done
  cat >/etc/cni/net.d/10-pods.conflist <<CNI
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipam": {
    "type": "host-local", "ranges": [[{"subnet": "10.244.$NUMBER.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
CNI
}

# Lowering oom_score_adj needs CAP_SYS_RESOURCE, which may be missing here, so it is not requested.
configure_containerd() {
  cat >"$OWN/containerd.toml" <<CONTAINERD
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.internal.v1.tracing"]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
CONTAINERD
}

configure_kubelet() {
  cat >"$OWN/kubelet.yaml" <<KUBELET
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $PKI/kubelet-$NAME.crt
tlsPrivateKeyFile: $PKI/kubelet-$NAME.key
resolvConf: ""
failSwapOn: false
maxOpenFiles: $(ulimit -Hn)
maxPods: 250
oomScoreAdj: 0
evictionHard: {nodefs.available: "1%", nodefs.inodesFree: "1%", imagefs.available: "1%", memory.available: "100Mi"}
imageGCHighThresholdPercent: 100
kubeAPIQPS: 100
kubeAPIBurst: 200
eventRecordQPS: 0
registryPullQPS: 0
serializeImagePulls: false
nodeStatusUpdateFrequency: 5s
shutdownGracePeriod: 0s
KUBELET
}

# Containers stay in the cgroups of these services and survive the end of one of them, as on any node.
write_service() {
  local name=$1 after=$2 kind=$3
  shift 3
  cat >"$UNITS/$name.service" <<SERVICE
[Unit]
After=$after
[Service]
Type=$kind
$(printf '%s\n' "$@")
Delegate=yes
KillMode=process
Restart=always
RestartSec=200ms
StartLimitIntervalSec=0
StandardOutput=append:$LOGS/$NAME-$name.log
StandardError=append:$LOGS/$NAME-$name.log
Environment=PATH=$PATH
SERVICE
}

write_units() {
  local target
  mkdir -p "$UNITS"
  for target in sysinit basic shutdown multi-user; do
    printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' "$target" >"$UNITS/$target.target"
  done
  printf 'Requires=sysinit.target\nAfter=sysinit.target\n' >>"$UNITS/basic.target"
  printf 'Requires=basic.target\nAfter=basic.target\nWants=containerd.service kubelet.service\n' >>"$UNITS/multi-user.target"
  write_service containerd basic.target notify \
    "ExecStart=/usr/bin/containerd --config $OWN/containerd.toml --log-level warn" \
    "ExecStartPost=$here/load-images.sh $DIRECTORY/images"
  write_service kubelet containerd.service simple \
    "ExecStart=$KUBE kubelet --config $OWN/kubelet.yaml --kubeconfig $PKI/node-$NAME.kubeconfig --hostname-override $NAME --node-ip $ADDRESS --root-dir /var/lib/kubelet --cert-dir $OWN/certificates"
}

mount --make-rprivate /
mount_sysfs_and_cgroups
protect_sysctls
show_sysctls
mount_files
# systemd reads it from there.
echo "$NAME" >/etc/hostname
hostname "$NAME"
connect
configure_containerd
configure_kubelet
write_units
: >"$LOGS/$NAME-systemd.log"
: >"$OWN/run/started"
# systemd logs to our file instead of the kernel log. The unit path must contain /run/systemd/transient, or a reload forgets all
# units.
mount --bind "$LOGS/$NAME-systemd.log" /dev/kmsg
mount --bind /dev/null /dev/console
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin container=s3csi \
  SYSTEMD_LOG_TARGET=kmsg SYSTEMD_LOG_LEVEL=info SYSTEMD_UNIT_PATH="/run/systemd/transient:$UNITS" \
  SYSTEMD_GENERATOR_PATH="$OWN/none" SYSTEMD_ENVIRONMENT_GENERATOR_PATH="$OWN/none" \
  /lib/systemd/systemd --system --unit=multi-user.target --show-status=no >>"$LOGS/$NAME-systemd.log" 2>&1
