// One program that is every program of a small Kubernetes, so that the machine links once and not seven times.
// It acts by the name it is called by (a symbolic link), or by its first argument: `kube etcd …`.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

const self = "kube"

// The programs that are one cobra command each. etcd, kubectl and pki have entrances of their own.
var commands = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	// The components read os.Args themselves, so the name of the program has to be its first element.
	if filepath.Base(os.Args[0]) == self && len(os.Args) > 1 {
		os.Args = os.Args[1:]
	}
	switch name := filepath.Base(os.Args[0]); name {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kubectl":
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			kubectlutil.CheckErr(err)
		}
	case "pki":
		if err := writePKI(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "pki:", err)
			os.Exit(1)
		}
	default:
		command, known := commands[name]
		if !known {
			fmt.Fprintln(os.Stderr, usage())
			os.Exit(64)
		}
		os.Exit(cli.Run(command()))
	}
}

func usage() string {
	names := []string{"etcd", "kubectl", "pki"}
	for name := range commands {
		names = append(names, name)
	}
	return fmt.Sprintf("usage: %s %s …", self, strings.Join(names, " | "))
}
