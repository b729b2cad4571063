//! A small cluster in memory: the API server's versions and preconditions, Pods that start, fail and end, users who edit and
//! delete, an earlier driver, and controllers that use stale caches and may die between any two calls.
//! It obeys what a decision demands of the controller that applies it, and nothing more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::*;

/// The cluster as it really is.
#[derive(Clone, Debug)]
pub struct World {
    pub now: i64,
    /// Of all its controllers.
    pub trust: Trust,
    /// The last number given to anything that needs to be told apart.
    serial: u64,
    pub facts: Facts,
    /// Workloads that were attached once. They must stay so as long as they live.
    promised: BTreeSet<WorkloadUid>,
    /// Workloads whose attachment a user deleted: what they had is not known any more.
    disowned: BTreeSet<WorkloadUid>,
    /// UIDs of Mountpoint Pods that we, and no user, retired.
    retired_by_us: BTreeSet<String>,
    /// UIDs of warm Pods that a source has adopted.
    pub adopted: BTreeSet<String>,
}

/// What can be seen, in truth or through a cache.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub workloads: BTreeMap<WorkloadUid, WorkloadState>,
    pub pods: BTreeMap<String, MountpointPod>,
    /// Warm Pods of the node.
    pub warm: BTreeMap<String, MountpointPod>,
    pub attachments: BTreeMap<String, Attachment>,
    /// How often the PV's options were edited.
    pub edits: u8,
}

#[derive(Clone, Debug)]
pub struct WorkloadState {
    pub phase: PodPhase,
    pub is_terminating: bool,
    pub has_fs_group: bool,
}

/// One of the controllers: a cache, and the steps of the decision that it is about to apply.
#[derive(Clone, Debug, Default)]
pub struct Controller {
    pub cache: Facts,
    gone: BTreeSet<WorkloadUid>,
    pub steps: VecDeque<Step>,
    /// Versions that the writes of the current decision returned.
    written: BTreeMap<String, String>,
}

/// What a controller believes before it brings a Mountpoint Pod's name into use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// That a workload lives, once it has read so without a cache.
    Reads,
    /// That a workload lives, because its cache says so. Only one controller at a time may believe that.
    Cache,
}

/// One call to the API server.
#[derive(Clone, Debug)]
pub enum Step {
    Write(AttachmentWrite),
    Pod(PodAction),
    /// The second half of a retirement, after the look without a cache.
    Annotate {
        name: String,
        uid: String,
    },
    Delete(Deletion),
}

/// Which part of a cache catches up.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    Workloads,
    /// The watch was cut, and deletions in between were not reported.
    WorkloadsWithoutDeletions,
    Pods,
    Attachments,
    Volume,
}

impl World {
    pub fn new(trust: Trust) -> Self {
        Self {
            now: NOW,
            trust,
            serial: 0,
            facts: Facts::default(),
            promised: BTreeSet::new(),
            disowned: BTreeSet::new(),
            retired_by_us: BTreeSet::new(),
            adopted: BTreeSet::new(),
        }
    }

    pub fn add_workload(&mut self, phase: PodPhase, has_fs_group: bool) {
        let name = format!("workload-{}", self.next());
        self.facts.workloads.insert(uid(&name), WorkloadState { phase, is_terminating: false, has_fs_group });
    }

    pub fn next(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// An earlier driver: the Pod first, then an attachment under a random name, whatever else there is.
    pub fn attach_as_before(&mut self, workload: &WorkloadUid) {
        let Some(requirement) = self.facts.requirement(workload) else {
            return;
        };
        let name = mountpoint_pod_name(workload, &volume_name());
        let mut pod = self.new_pod(&name);
        pod.driver_version = Some("1.9".to_owned());
        self.facts.pods.entry(name.clone()).or_insert(pod);
        let entry = Entry { workload: workload.clone(), attached_at: at(self.now) };
        let (serial, resource_version) = (self.next(), self.next().to_string());
        let attachment = Attachment {
            name: format!("s3pa-{serial:05}"),
            resource_version,
            is_terminating: false,
            fields: AttachmentFields { authentication_source: None, ..requirement.fields },
            entries: BTreeMap::from([(name, vec![entry])]),
        };
        self.facts.attachments.insert(attachment.name.clone(), attachment);
    }

    pub fn delete_attachment_by_hand(&mut self, name: &str) {
        if let Some(attachment) = self.facts.attachments.remove(name) {
            self.disowned.extend(attachment.entries.into_values().flatten().map(|it| it.workload));
        }
    }

    pub fn touch_pod(&mut self, name: &str, change: impl FnOnce(&mut MountpointPod)) {
        let resource_version = self.next().to_string();
        if let Some(pod) = self.facts.pods.get_mut(name) {
            change(pod);
            pod.resource_version = resource_version;
        }
    }

    /// What must be true at any time. Controllers that believe their caches may bring the name of a retired Pod back into
    /// use; then the next Pod takes the name, which [`World::check_settled`] sees.
    pub fn check(&mut self) -> Result<(), String> {
        for attachment in self.facts.attachments.values() {
            for (name, entries) in &attachment.entries {
                let is_retired_by_us = self.facts.pods_of(name).any(|it| self.retired_by_us.contains(&it.uid));
                for entry in entries.iter().filter(|it| self.facts.is_live(&it.workload)) {
                    self.promised.insert(entry.workload.clone());
                    if is_retired_by_us && self.trust == Trust::Reads {
                        return Err(format!("{name} was retired and serves {}", entry.workload));
                    }
                }
            }
        }
        for workload in self.promised.difference(&self.disowned) {
            if self.facts.is_live(workload) && self.facts.places(workload) == 0 {
                return Err(format!("{workload} lives and lost its attachment"));
            }
        }
        Ok(())
    }

    /// What must be true in the end.
    pub fn check_settled(&self) -> Result<(), String> {
        for (workload, state) in &self.facts.workloads {
            let places = self.facts.places(workload);
            let is_live = state.activity().is_live();
            let was_promised = self.promised.contains(workload) && !self.disowned.contains(workload);
            let is_wrong = match places {
                0 => is_live && (was_promised || state.activity() == Activity::Starting),
                1 => !is_live,
                _ => true,
            };
            if is_wrong {
                return Err(format!("{workload} ({state:?}) is attached {places} times"));
            }
        }
        for attachment in self.facts.attachments.values() {
            if attachment.entries.is_empty() {
                return Err(format!("{} has no entries", attachment.name));
            }
            for (name, entries) in &attachment.entries {
                if entries.is_empty() || !entries.iter().all(|it| self.facts.is_live(&it.workload)) {
                    return Err(format!("{} has a leftover for {name}", attachment.name));
                }
                let pods: Vec<&MountpointPod> = self.facts.pods_of(name).collect();
                match pods[..] {
                    [pod] if pod.phase == PodPhase::Running && !pod.is_terminating => {
                        let is_upgradable =
                            pod.is_mounted && pod.is_movable && !pod.refuses_new_workloads && !pod.is_retired;
                        if is_upgradable && pod.driver_version.as_deref() != Some(VERSION) {
                            return Err(format!("{name} is not of the current version"));
                        }
                    }
                    // Users have ended all of them, and wait for the workloads to go.
                    _ if pods.iter().all(|it| it.is_retired && !self.retired_by_us.contains(&it.uid))
                        && !pods.is_empty() => {}
                    _ => return Err(format!("{name} serves somebody and has {pods:?}")),
                }
            }
        }
        for name in self.facts.pods.values().map(|it| &it.source) {
            let is_named = self.facts.attachments.values().any(|it| it.entries.contains_key(name));
            let live = self.facts.workloads.keys().filter(|it| self.facts.is_live(it));
            let has_live_creator = live.into_iter().any(|it| mountpoint_pod_name(it, &volume_name()) == *name);
            if !is_named && !has_live_creator {
                return Err(format!("{name} serves no workload"));
            }
        }
        Ok(())
    }

    /// What nodes do in a moment of peace: Pods run, retired ones end unless a workload uses them, deleted ones go, and
    /// workloads whose Mountpoint Pod runs start.
    pub fn let_nodes_work(&mut self) -> bool {
        let before = self.serial;
        for pod in self.facts.warm.values_mut().filter(|it| it.phase == PodPhase::Pending) {
            self.serial += 1;
            (pod.phase, pod.resource_version) = (PodPhase::Running, self.serial.to_string());
        }
        let sources: BTreeSet<String> = self.facts.pods.values().map(|it| it.source.clone()).collect();
        for source in &sources {
            self.let_node_serve(source);
        }
        for name in self.facts.pods.keys().cloned().collect::<Vec<_>>() {
            let Some(pod) = self.facts.pods.get(&name) else {
                continue;
            };
            let is_in_use = self.facts.is_in_use(&pod.source);
            match pod.phase {
                // It serves until another one takes over.
                PodPhase::Running if pod.is_terminating && pod.is_movable && !pod.is_retired && is_in_use => {}
                _ if pod.is_terminating => {
                    self.facts.pods.remove(&name);
                    self.next();
                }
                PodPhase::Pending => self.touch_pod(&name, |it| it.phase = PodPhase::Running),
                PodPhase::Running if pod.is_retired && !is_in_use => {
                    self.touch_pod(&name, |it| it.phase = PodPhase::Succeeded);
                }
                PodPhase::Running | PodPhase::Succeeded | PodPhase::Failed | PodPhase::Unknown => {}
            }
        }
        for workload in self.facts.workloads.keys().cloned().collect::<Vec<_>>() {
            if self.start_workload(&workload) {
                self.next();
            }
        }
        before != self.serial
    }

    /// The newest Pod that can serve a source does so; another one that did has moved it there.
    fn let_node_serve(&mut self, source: &str) {
        let pods = newest_first(self.facts.pods_of(source), MountpointPod::identity);
        let is_running = |it: &&&MountpointPod| it.phase == PodPhase::Running && !it.is_retired;
        let serving = pods.iter().filter(is_running).find(|it| it.is_mounted).map(|it| it.name.clone());
        let newest = pods.iter().filter(is_running).find(|it| !it.is_terminating).map(|it| it.name.clone());
        let Some(next) = newest.or_else(|| serving.clone()) else { return };
        let has_old_mounter = |it: &&&MountpointPod| it.driver_version.as_deref() == Some("1.9");
        let is_movable = pods.iter().find(|it| it.name == next).is_some_and(|it| !has_old_mounter(&it));
        let others: Vec<String> =
            pods.iter().filter(|it| it.name != next && it.is_mounted).map(|it| it.name.clone()).collect();
        for name in others {
            self.touch_pod(&name, |it| (it.is_mounted, it.is_movable) = (false, false));
        }
        if serving.as_ref() != Some(&next) {
            self.touch_pod(&next, |it| (it.is_mounted, it.is_movable) = (true, is_movable));
        }
    }

    /// A workload starts when kubelet found its mount.
    pub fn start_workload(&mut self, workload: &WorkloadUid) -> bool {
        let is_served = assignment(self.facts.attachments.values(), workload).is_some_and(|it| {
            self.facts.pods_of(it.mountpoint_pod).any(|it| it.phase == PodPhase::Running && !it.is_retired)
        });
        match self.facts.workloads.get_mut(workload) {
            Some(state) if is_served && state.activity() == Activity::Starting => {
                state.phase = PodPhase::Running;
                true
            }
            Some(_) | None => false,
        }
    }

    pub fn new_pod(&mut self, name: &str) -> MountpointPod {
        MountpointPod {
            name: name.to_owned(),
            source: name.to_owned(),
            uid: format!("pod-{}", self.next()),
            resource_version: self.next().to_string(),
            created_at: at(self.now),
            ..pod("a", PodPhase::Pending)
        }
    }
}

impl Controller {
    pub fn catch_up(&mut self, world: &World, part: Part) {
        let Facts { workloads, pods, warm, attachments, edits } = world.facts.clone();
        match part {
            Part::Workloads => {
                self.gone.extend(self.cache.workloads.keys().filter(|it| !workloads.contains_key(it)).cloned());
                self.cache.workloads = workloads;
            }
            Part::WorkloadsWithoutDeletions => self.cache.workloads = workloads,
            Part::Pods => (self.cache.pods, self.cache.warm) = (pods, warm),
            Part::Attachments => self.cache.attachments = attachments,
            Part::Volume => self.cache.edits = edits,
        }
    }

    pub fn catch_up_fully(&mut self, world: &World) {
        for part in [Part::Workloads, Part::Pods, Part::Attachments, Part::Volume] {
            self.catch_up(world, part);
        }
    }

    /// Decides by its cache, once it has applied what it decided before.
    pub fn decide(&mut self, world: &World) -> Decision {
        let decision = decide(&self.cache.observe(&self.gone), at(world.now));
        let Decision { attachment_writes, pods, deletions, .. } = decision.clone();
        let steps = attachment_writes.into_iter().map(Step::Write).chain(pods.into_iter().map(Step::Pod));
        self.steps = steps.chain(deletions.into_iter().map(Step::Delete)).collect();
        self.written.clear();
        decision
    }

    pub fn crash(&mut self) {
        *self = Self { cache: std::mem::take(&mut self.cache), ..Self::default() };
    }

    /// Makes the next call.
    pub fn step(&mut self, world: &mut World) -> Result<(), String> {
        let Some(step) = self.steps.pop_front() else {
            return Ok(());
        };
        match step {
            Step::Write(write) => {
                let is_written = self.write(world, write);
                if !is_written {
                    self.steps.clear();
                }
            }
            Step::Pod(PodAction::Start { name, source, .. }) => {
                let pod = MountpointPod { source, ..world.new_pod(&name) };
                world.facts.pods.entry(name).or_insert(pod);
            }
            Step::Pod(PodAction::Adopt { name, uid: _, resource_version, source, workload: _ }) => {
                world.adopt(&name, &resource_version, Some(source))?;
            }
            Step::Pod(PodAction::Retire { name, uid, source, creator }) => {
                let workloads = match creator {
                    CreatorState::Ended => &self.cache.workloads,
                    CreatorState::Unseen => &world.facts.workloads,
                };
                let fresh = Facts { workloads: workloads.clone(), ..world.facts.clone() };
                if may_retire(&fresh.observe(&BTreeSet::new()), &source) {
                    self.steps.push_front(Step::Annotate { name, uid });
                }
            }
            Step::Annotate { name, uid } => {
                let found = world.facts.pods.get(&name).filter(|it| it.uid == uid);
                if found.is_some() {
                    world.touch_pod(&name, |it| it.is_retired = true);
                    world.retired_by_us.insert(uid);
                }
            }
            Step::Delete(Deletion::MountpointPod { name, uid, resource_version }) => {
                let found = world.facts.pods.get(&name);
                if let Some(pod) = found.filter(|it| it.uid == uid && it.resource_version == resource_version) {
                    let never_ran = pod.is_retired && pod.phase == PodPhase::Pending;
                    let mut others = world.facts.pods.values().filter(|it| it.source == pod.source && it.uid != uid);
                    let is_replaced = !pod.is_mounted && others.any(|it| it.is_mounted);
                    let may_go = pod.phase.is_finished() || never_ran || is_replaced;
                    world.facts.pods.remove(&name);
                    return may_go.then_some(()).ok_or(format!("{name} was deleted while it may serve"));
                }
            }
            Step::Delete(Deletion::Attachment { name, precondition }) => {
                let version = match precondition {
                    Precondition::ResourceVersion(version) => Some(version),
                    Precondition::AsWritten => self.written.get(&name).cloned(),
                };
                let found = world.facts.attachments.get(&name);
                if found.is_some_and(|it| Some(&it.resource_version) == version.as_ref()) {
                    world.facts.attachments.remove(&name);
                }
            }
        }
        Ok(())
    }

    /// A compare-and-swap; `false` if it was lost, or if a workload is not what it was believed to be.
    fn write(&mut self, world: &mut World, write: AttachmentWrite) -> bool {
        if write.stale_workloads().any(|it| world.facts.workloads.contains_key(it)) {
            return false;
        }
        if world.trust == Trust::Reads && !write.creators().all(|it| world.facts.is_live(it)) {
            return false;
        }
        let version = world.next().to_string();
        self.written.insert(write.name().to_owned(), version.clone());
        let attachments = &mut world.facts.attachments;
        match write {
            AttachmentWrite::CreateAttachment { name, fields, entries, .. } => {
                if attachments.contains_key(&name) {
                    return false;
                }
                let (key, is_terminating, resource_version) = (name.clone(), false, version);
                attachments.insert(key, Attachment { name, resource_version, is_terminating, fields, entries });
                true
            }
            AttachmentWrite::EditAttachment { name, resource_version, entries, .. } => {
                match attachments.get_mut(&name).filter(|it| it.resource_version == resource_version) {
                    Some(attachment) => {
                        attachment.entries = entries;
                        attachment.resource_version = version;
                        true
                    }
                    None => false,
                }
            }
        }
    }
}

impl Facts {
    pub fn observe(&self, gone: &BTreeSet<WorkloadUid>) -> ObservedState {
        let workload = |(uid, state): (&WorkloadUid, &WorkloadState)| PodOnNode {
            uid: uid.clone(),
            activity: state.activity(),
            requirement: self.requirement(uid).map(Ok),
        };
        ObservedState {
            persistent_volume: volume_name(),
            driver_version: VERSION.to_owned(),
            volume: VolumeState::Usable,
            workloads: self.workloads.iter().map(workload).collect(),
            gone: gone.clone(),
            elsewhere: Vec::new(),
            attachments: self.attachments.values().cloned().collect(),
            mountpoint_pods: self.pods.values().cloned().collect(),
            may_upgrade: true,
            warm_pods: self.warm.values().cloned().collect(),
            template: Some(template()),
        }
    }

    fn requirement(&self, workload: &WorkloadUid) -> Option<MountRequirement> {
        let state = self.workloads.get(workload)?;
        let mount_options = format!("--uid={}", self.edits);
        let fs_group = state.has_fs_group.then(|| "1000".to_owned());
        Some(requirement(SharingKey { mount_options, fs_group, ..plain_key() }))
    }

    fn is_live(&self, workload: &WorkloadUid) -> bool {
        self.workloads.get(workload).is_some_and(|it| it.activity().is_live())
    }

    /// How often a workload is attached.
    fn places(&self, workload: &WorkloadUid) -> usize {
        let entries = self.attachments.values().flat_map(|it| it.entries.values()).flatten();
        entries.filter(|it| it.workload == *workload).count()
    }

    fn pods_of(&self, source: &str) -> impl Iterator<Item = &MountpointPod> {
        self.pods.values().filter(move |it| it.source == source)
    }

    fn is_in_use(&self, mountpoint_pod: &str) -> bool {
        let entries = self.attachments.values().filter_map(|it| it.entries.get(mountpoint_pod)).flatten();
        let activities = entries.filter_map(|it| self.workloads.get(&it.workload)).map(WorkloadState::activity);
        activities.into_iter().any(|it| it == Activity::Using)
    }
}

impl WorkloadState {
    pub const fn activity(&self) -> Activity {
        Activity::of(self.phase, self.is_terminating)
    }
}
