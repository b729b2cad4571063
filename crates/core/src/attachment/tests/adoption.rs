//! Warm Mountpoint Pods: a source whose Pod would be created adopts one instead, if it is of the same kind.

use super::world::World;
use super::*;

#[test]
fn a_new_source_adopts_a_warm_pod() {
    let given = scene().starting("a").warm(warm_pod("1", PodPhase::Running));
    given.check(&["create A: a to mp(a)", "adopt warm-1 as mp(a) for a"]);
    given.check_notices(&["a: served by Mountpoint Pod warm-1 (kubectl describe s3pa A)"]);
}

#[test]
fn a_shared_source_adopts_none() {
    scene()
        .using("a")
        .starting("b")
        .attachment(&["mp(a): a"])
        .running_pod("a")
        .warm(warm_pod("1", PodPhase::Running))
        .check(&["edit A: b to mp(a)"]);
}

#[test]
fn people_hear_of_the_pod_and_not_of_its_source() {
    let adopted = MountpointPod { source: own_pod("a"), warm: None, ..warm_pod("1", PodPhase::Running) };
    scene()
        .using("a")
        .starting("b")
        .attachment(&["mp(a): a"])
        .pod(adopted)
        .check_notices(&["b: served by Mountpoint Pod warm-1 (kubectl describe s3pa A)"]);
}

#[test]
fn a_pod_that_was_lost_is_replaced_by_a_warm_one() {
    scene()
        .using("a")
        .attachment(&["mp(a): a"])
        .warm(warm_pod("1", PodPhase::Running))
        .check(&["adopt warm-1 as mp(a) for a"]);
}

#[test]
fn each_source_adopts_another_one_as_long_as_there_are_some() {
    scene()
        .starting("a")
        .requiring("b", Activity::Starting, Ok(with_fs_group("1")))
        .requiring("c", Activity::Starting, Ok(with_fs_group("2")))
        .with(|it| it.warm_pods = ["1", "2"].map(|it| warm_pod(it, PodPhase::Running)).to_vec())
        .check_pods(3, 2);
}

#[test]
fn one_that_runs_is_taken_before_one_that_is_about_to() {
    let young = MountpointPod { created_at: at(NOW - 1), ..warm_pod("1", PodPhase::Running) };
    let old = MountpointPod { created_at: at(NOW - 9), ..warm_pod("2", PodPhase::Running) };
    let pending = MountpointPod { created_at: at(NOW - 99), ..warm_pod("3", PodPhase::Pending) };
    let given = |pods: &[&MountpointPod]| {
        scene().starting("a").with(|it| it.warm_pods = pods.iter().map(|it| (*it).clone()).collect())
    };
    given(&[&young, &old, &pending]).check(&["create A: a to mp(a)", "adopt warm-2 as mp(a) for a"]);
    given(&[&young, &pending]).check(&["create A: a to mp(a)", "adopt warm-1 as mp(a) for a"]);
    given(&[&pending]).check(&["create A: a to mp(a)", "adopt warm-3 as mp(a) for a"]);
}

#[test]
fn only_a_pod_that_can_serve_the_volume_is_adopted() {
    let check = |change: fn(&mut MountpointPod)| {
        let mut pod = warm_pod("1", PodPhase::Running);
        change(&mut pod);
        scene().starting("a").warm(pod).check(&["create A: a to mp(a)", "start mp(a) for a in A"]);
    };
    check(|it| it.warm = Some(PodTemplate::of_spec("other")));
    check(|it| it.warm = None);
    check(|it| it.driver_version = Some("1.9".to_owned()));
    check(|it| it.is_terminating = true);
    check(|it| it.is_retired = true);
    check(|it| it.refuses_new_workloads = true);
    check(|it| it.phase = PodPhase::Failed);
    check(|it| it.phase = PodPhase::Unknown);
    check(|it| (it.phase, it.problem) = (PodPhase::Pending, Some("Unschedulable".to_owned())));
    scene()
        .starting("a")
        .warm(warm_pod("1", PodPhase::Running))
        .with(|it| it.template = None)
        .check(&["create A: a to mp(a)", "start mp(a) for a in A"]);
}

#[test]
fn a_volume_that_cannot_be_served_adopts_none() {
    scene()
        .starting("a")
        .attachment(&["mp(a): a"])
        .warm(warm_pod("1", PodPhase::Running))
        .with(|it| it.volume = VolumeState::Missing)
        .check(&[]);
}

/// An adopted Pod differs from others by its name only.
#[test]
fn an_adopted_pod_ends_with_its_last_workload() {
    let adopted = MountpointPod { source: own_pod("a"), warm: None, ..warm_pod("1", PodPhase::Running) };
    scene().over("a").attachment(&["mp(a): a"]).pod(adopted.clone()).check(&[
        "edit A: a from mp(a) finished, without mp(a)",
        "retire warm-1",
        "delete A as written",
    ]);
    // It was adopted, but the workload was gone before the attachment was seen.
    scene().gone("a").pod(adopted).check(&["retire warm-1"]);
}

/// Warm Pods in random worlds.
impl World {
    pub fn add_warm_pod(&mut self) {
        let name = format!("warm-{}", self.next());
        let pod = MountpointPod { warm: Some(template()), ..self.new_pod(&name) };
        self.facts.warm.insert(name, pod);
    }

    /// Adopts a warm Pod if it still has this version. Without a source, it is for another volume.
    pub fn adopt(&mut self, name: &str, resource_version: &str, source: Option<String>) -> Result<(), String> {
        if self.facts.warm.get(name).is_none_or(|it| it.resource_version != resource_version) {
            return Ok(());
        }
        let resource_version = self.next().to_string();
        let Some(pod) = self.facts.warm.remove(name) else { return Ok(()) };
        if !self.adopted.insert(pod.uid.clone()) {
            return Err(format!("{name} was adopted twice"));
        }
        if let Some(source) = source {
            self.facts.pods.insert(name.to_owned(), MountpointPod { source, resource_version, warm: None, ..pod });
        }
        Ok(())
    }
}
