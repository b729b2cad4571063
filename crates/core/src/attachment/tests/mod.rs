//! Scenes for the rules: facts are set up in a few words, decisions are read as lines of text.

mod adoption;
mod cleanup;
mod identity;
mod laws;
mod replacement;
mod requirements;
mod sharing;
mod world;

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::identifiers::{PvName, WorkloadUid};
use crate::mountpoint_pod::PodTemplate;
use crate::names::mountpoint_pod_name;
use crate::publish::{Access, AuthenticationSource};
use crate::sharing::SharingKey;

const NOW: i64 = 1_000_000;
const VERSION: &str = "2.0";

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix_seconds(seconds)
}

fn uid(text: &str) -> WorkloadUid {
    text.parse().unwrap()
}

fn volume_name() -> PvName {
    "pv".parse().unwrap()
}

fn own_pod(workload: &str) -> String {
    mountpoint_pod_name(&uid(workload), &volume_name())
}

fn plain_key() -> SharingKey {
    SharingKey { mount_options: "--allow-delete\n--uid=1".to_owned(), ..crate::sharing::tests::key() }
}

fn plain_need() -> MountRequirement {
    requirement(plain_key())
}

fn requirement(key: SharingKey) -> MountRequirement {
    let options: Vec<String> = key.mount_options.lines().map(|it| it.trim_start_matches('-').to_owned()).collect();
    MountRequirement::new(key, volume_name(), &options, NodeScope::AllNodes)
}

fn with_fs_group(fs_group: &str) -> MountRequirement {
    requirement(SharingKey { fs_group: Some(fs_group.to_owned()), ..plain_key() })
}

/// Fields as earlier drivers wrote them.
fn legacy_fields() -> AttachmentFields {
    AttachmentFields { authentication_source: None, ..plain_need().fields }
}

fn pod(workload: &str, phase: PodPhase) -> MountpointPod {
    MountpointPod {
        name: own_pod(workload),
        source: own_pod(workload),
        uid: format!("uid of {workload}"),
        resource_version: "5".to_owned(),
        phase,
        is_terminating: false,
        is_retired: false,
        refuses_new_workloads: false,
        driver_version: Some(VERSION.to_owned()),
        is_mounted: false,
        is_movable: false,
        created_at: at(NOW - 60),
        problem: None,
        warm: None,
    }
}

/// The Pod that takes over from the first one of a source.
fn successor(workload: &str) -> MountpointPod {
    let first = pod(workload, PodPhase::Running);
    MountpointPod {
        name: successor_name(&first.source, &first.uid),
        uid: format!("second uid of {workload}"),
        created_at: at(NOW - 30),
        ..first
    }
}

fn template() -> PodTemplate {
    PodTemplate::of_spec("spec")
}

/// A warm Pod, which is named like a number.
fn warm_pod(number: &str, phase: PodPhase) -> MountpointPod {
    let (name, uid) = (format!("warm-{number}"), format!("uid of warm {number}"));
    MountpointPod { source: name.clone(), name, uid, warm: Some(template()), ..pod("a", phase) }
}

/// Facts about one PV on one node, and names to call things by: Mountpoint Pods are called `mp(a)` after the workload
/// whose name they bear, the attachment of the plain key is `A`, those of other keys `A(fsGroup)`.
struct Scene {
    observed: ObservedState,
    labels: Vec<(String, String)>,
}

fn scene() -> Scene {
    let mut labels: Vec<(String, String)> =
        ["a", "b", "c", "d"].iter().map(|it| (own_pod(it), format!("mp({it})"))).collect();
    labels.push((successor("a").name, "next(a)".to_owned()));
    labels.push((attachment_name(&plain_key()), "A".to_owned()));
    Scene {
        observed: ObservedState {
            persistent_volume: volume_name(),
            driver_version: VERSION.to_owned(),
            volume: VolumeState::Usable,
            workloads: Vec::new(),
            gone: BTreeSet::new(),
            elsewhere: Vec::new(),
            attachments: Vec::new(),
            mountpoint_pods: Vec::new(),
            may_upgrade: true,
            warm_pods: Vec::new(),
            template: Some(template()),
        },
        labels,
    }
}

impl Scene {
    fn with(mut self, change: impl FnOnce(&mut ObservedState)) -> Self {
        change(&mut self.observed);
        self
    }

    fn workload(self, name: &str, activity: Activity) -> Self {
        self.requiring(name, activity, Ok(plain_need()))
    }

    fn requiring(
        mut self,
        name: &str,
        activity: Activity,
        requirement: Result<MountRequirement, VolumeRefusal>,
    ) -> Self {
        if let Ok(requirement) = &requirement
            && let Some(fs_group) = &requirement.key.fs_group
        {
            self.labels.push((attachment_name(&requirement.key), format!("A({fs_group})")));
        }
        self.observed.workloads.push(PodOnNode { uid: uid(name), activity, requirement: Some(requirement) });
        self
    }

    fn starting(self, name: &str) -> Self {
        self.workload(name, Activity::Starting)
    }

    fn using(self, name: &str) -> Self {
        self.workload(name, Activity::Using)
    }

    fn over(self, name: &str) -> Self {
        self.workload(name, Activity::Finished)
    }

    fn gone(self, name: &str) -> Self {
        self.with(|it| {
            it.gone.insert(uid(name));
        })
    }

    fn pod(self, pod: MountpointPod) -> Self {
        self.with(|it| it.mountpoint_pods.push(pod))
    }

    fn warm(self, pod: MountpointPod) -> Self {
        self.with(|it| it.warm_pods.push(pod))
    }

    fn running_pod(self, workload: &str) -> Self {
        self.pod(pod(workload, PodPhase::Running))
    }

    /// The attachment of the plain key, written ten seconds ago. `"mp(a): a b"`, one per Mountpoint Pod.
    fn attachment(self, entries: &[&str]) -> Self {
        self.attachment_of(&plain_need(), entries)
    }

    fn attachment_of(self, requirement: &MountRequirement, entries: &[&str]) -> Self {
        self.attachment_at(&attachment_name(&requirement.key), requirement.fields.clone(), entries, NOW - 10)
    }

    /// An attachment of an earlier driver.
    fn legacy(self, name: &str, entries: &[&str]) -> Self {
        self.attachment_at(name, legacy_fields(), entries, NOW - 10)
    }

    fn attachment_at(self, name: &str, fields: AttachmentFields, entries: &[&str], attached_at: i64) -> Self {
        let parse = |text: &str| {
            let (mountpoint_pod, workloads) = text.split_once(':').unwrap();
            let creator = mountpoint_pod.strip_prefix("mp(").unwrap().strip_suffix(')').unwrap();
            let entry = |it: &str| Entry { workload: uid(it), attached_at: at(attached_at) };
            (own_pod(creator), workloads.split_whitespace().map(entry).collect())
        };
        let entries = entries.iter().map(|it| parse(it)).collect();
        let (name, resource_version) = (name.to_owned(), "7".to_owned());
        self.with(|it| {
            it.attachments.push(Attachment { name, resource_version, is_terminating: false, fields, entries });
        })
    }

    /// The steps, in order, and when to look again.
    #[track_caller]
    fn check(&self, expected: &[&str]) {
        let decision = decide(&self.observed, at(NOW));
        let mut lines: Vec<String> = decision.attachment_writes.iter().map(spec_line).collect();
        lines.extend(decision.pods.iter().map(|it| match it {
            PodAction::Start { name, source, workload, attachment } if name == source => {
                format!("start {name} for {workload} in {attachment}")
            }
            PodAction::Start { name, source, .. } => format!("start {name} to take over {source}"),
            PodAction::Adopt { name, uid, resource_version, source, workload } => {
                assert!(!uid.is_empty() && resource_version == "5");
                format!("adopt {name} as {source} for {workload}")
            }
            PodAction::Retire { name, creator: CreatorState::Ended, .. } => format!("retire {name}"),
            PodAction::Retire { name, creator: CreatorState::Unseen, .. } => format!("retire {name} if really unused"),
        }));
        lines.extend(decision.deletions.iter().map(|it| match it {
            Deletion::MountpointPod { name, uid, resource_version } => {
                assert!(!uid.is_empty() && resource_version == "5");
                format!("delete {name}")
            }
            Deletion::Attachment { name, precondition: Precondition::AsWritten } => format!("delete {name} as written"),
            Deletion::Attachment { name, precondition: Precondition::ResourceVersion(version) } => {
                format!("delete {name} at {version}")
            }
        }));
        lines.extend(decision.requeue_after.map(|it| format!("look again in {} s", it.as_secs())));
        assert_eq!(decision.replaces_ahead(), lines.iter().any(|it| it.contains(" to take over ")));
        let lines: Vec<String> = lines.iter().map(|it| self.in_our_words(it)).collect();
        assert_eq!(lines, expected);
    }

    /// How many sources get a Pod, and how many of these a warm one.
    #[track_caller]
    fn check_pods(&self, sources: usize, adopted: usize) {
        let decision = decide(&self.observed, at(NOW));
        let names: BTreeSet<&str> = decision.adopted().collect();
        assert_eq!((decision.pods.len(), decision.adopted().count(), names.len()), (sources, adopted, adopted));
    }

    /// The notices.
    #[track_caller]
    fn check_notices(&self, expected: &[&str]) {
        let decision = decide(&self.observed, at(NOW));
        let tell = |it: &Notice| self.in_our_words(&format!("{}: {it}", it.workload()));
        assert_eq!(decision.notices.iter().map(tell).collect::<Vec<_>>(), expected);
    }

    fn in_our_words(&self, text: &str) -> String {
        self.labels.iter().fold(text.to_owned(), |text, (name, label)| text.replace(name.as_str(), label))
    }
}

fn spec_line(write: &AttachmentWrite) -> String {
    let change = |it: &AttachmentChange| match it {
        AttachmentChange::Attach { workload, mountpoint_pod, .. } => format!("{workload} to {mountpoint_pod}"),
        AttachmentChange::Detach { workload, mountpoint_pod, reason } => {
            format!("{workload} from {mountpoint_pod} {}", format!("{reason:?}").to_lowercase())
        }
        AttachmentChange::RemoveEntry { mountpoint_pod } => format!("without {mountpoint_pod}"),
    };
    let changes: Vec<String> = write.changes().iter().map(change).collect();
    let verb = match write {
        AttachmentWrite::CreateAttachment { .. } => "create",
        AttachmentWrite::EditAttachment { .. } => "edit",
    };
    format!("{verb} {}: {}", write.name(), changes.join(", "))
}

/// Claims and PVs by name.
#[derive(Default)]
struct Objects {
    claims: BTreeMap<(String, String), Claim>,
    volumes: BTreeMap<String, VolumeFacts>,
}

impl VolumeLister for Objects {
    fn claim(&self, namespace: &str, name: &str) -> Option<Claim> {
        self.claims.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    fn volume(&self, name: &str) -> Option<VolumeFacts> {
        self.volumes.get(name).cloned()
    }
}
