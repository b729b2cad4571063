//! The node plugin of a test with blocking calls, as kubelet makes them; what the worlds of all strategies share.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use s3csi_s3_server::S3Server;
use tokio::runtime::Runtime;
use tonic::{Code, Status};

use crate::fixture::Fixture;
use crate::http::{self, HttpResponse};
use crate::kubelet::{CsiVolume, Kubelet};
use crate::leftovers::mounts_beneath;
use crate::plugin::Plugin;
use crate::process::Process;
use crate::processes;

/// A store, a node's directories, and the node plugin once it was started.
pub struct TestNode<'a> {
    pub kubelet: Kubelet,
    pub plugin: Plugin<'a>,
    pub store: S3Server,
    pub runtime: Runtime,
    process: Option<Process>,
    fixture: &'a Fixture,
}

impl<'a> TestNode<'a> {
    pub fn new(fixture: &'a Fixture, store: S3Server, plugin: Plugin<'a>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let kubelet = runtime.block_on(async { plugin.kubelet() });
        Self { kubelet, plugin, store, runtime, process: None, fixture }
    }

    pub fn node(&self) -> &Process {
        self.process.as_ref().expect("the node plugin was not started")
    }

    pub fn start_node(&mut self) {
        self.start_node_with(&[]);
    }

    pub fn start_node_with(&mut self, arguments: &[&str]) {
        self.process = Some(self.plugin.start_node_with(arguments).unwrap());
        // A connection to an earlier node plugin would fail once before kubelet reconnects.
        self.kubelet = self.runtime.block_on(async { self.plugin.kubelet() });
    }

    /// What the node plugin answers at its health address, which it must have been started with.
    #[track_caller]
    pub fn get(&self, path: &str) -> HttpResponse {
        self.node().wait_for_log("serving /healthz");
        let log = self.node().errors();
        let address = log.lines().find_map(|it| it.split("address=").nth(1)).unwrap();
        http::get(address.split(' ').next().unwrap(), path)
    }

    /// One of the node plugin's figures, as it is called in the text that Prometheus reads.
    #[track_caller]
    pub fn figure(&self, name: &str) -> u64 {
        let HttpResponse { status, body, .. } = self.get("/metrics");
        assert_eq!(status, 200, "{body}");
        let line = body.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("there is no {name} in:\n{body}")).parse().unwrap()
    }

    pub fn kill_node(&mut self) {
        self.process.take().expect("the node plugin was not started").kill();
    }

    /// Waits for a node plugin that ends by itself.
    pub fn wait_for_end_of_node(&mut self) {
        self.process.take().expect("the node plugin was not started").wait_for_end();
    }

    /// Publishes and answers the target.
    #[track_caller]
    pub fn publish(&self, volume: &CsiVolume) -> PathBuf {
        match self.try_publish(volume) {
            Ok(target) => target,
            Err(status) => panic!("{} not published: {:?}: {}", volume.pv, status.code(), status.message()),
        }
    }

    pub fn try_publish(&self, volume: &CsiVolume) -> Result<PathBuf, Status> {
        self.runtime.block_on(self.kubelet.publish(volume))
    }

    /// With less time than kubelet gives. The answer must come in it.
    #[track_caller]
    pub fn try_publish_within(&self, volume: &CsiVolume, time: Duration) -> Result<(), Status> {
        let start = Instant::now();
        let target = self.kubelet.target(volume);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        let mut request = tonic::Request::new(self.kubelet.publish_request(volume));
        request.set_timeout(time);
        let outcome = self.runtime.block_on(self.kubelet.node().node_publish_volume(request));
        assert!(start.elapsed() < time, "took {:?}", start.elapsed());
        outcome.map(drop)
    }

    /// All of them at once; panics if one is refused.
    #[track_caller]
    pub fn publish_together(&self, volumes: impl IntoIterator<Item = CsiVolume>) -> Vec<PathBuf> {
        let calls: Vec<_> = volumes.into_iter().map(|it| self.publish_in_background(&it)).collect();
        calls.into_iter().map(|it| self.runtime.block_on(it).unwrap().unwrap()).collect()
    }

    #[track_caller]
    pub fn unpublish_together(&self, volumes: impl IntoIterator<Item = CsiVolume>) {
        let calls: Vec<_> = volumes.into_iter().map(|it| self.unpublish_in_background(&it)).collect();
        for call in calls {
            self.runtime.block_on(call).unwrap().unwrap();
        }
    }

    #[track_caller]
    pub fn unpublish(&self, volume: &CsiVolume) {
        if let Err(status) = self.try_unpublish(volume) {
            panic!("{} not unpublished: {:?}: {}", volume.pv, status.code(), status.message());
        }
    }

    pub fn try_unpublish(&self, volume: &CsiVolume) -> Result<(), Status> {
        self.runtime.block_on(self.kubelet.unpublish(volume))
    }

    /// A publish that runs while the test does something else.
    pub fn publish_in_background(&self, volume: &CsiVolume) -> tokio::task::JoinHandle<Result<PathBuf, Status>> {
        let (kubelet, volume) = (self.kubelet.clone(), volume.clone());
        self.runtime.spawn(async move { kubelet.publish(&volume).await })
    }

    pub fn unpublish_in_background(&self, volume: &CsiVolume) -> tokio::task::JoinHandle<Result<(), Status>> {
        let (kubelet, volume) = (self.kubelet.clone(), volume.clone());
        self.runtime.spawn(async move { kubelet.unpublish(&volume).await })
    }

    /// Every engine process of this node.
    pub fn engine_processes(&self) -> Vec<Pid> {
        processes::running("mount-s3", self.fixture.directory())
    }

    /// What is mounted for this node.
    pub fn mounts(&self) -> Vec<PathBuf> {
        mounts_beneath(self.fixture.directory())
    }

    /// Stops the node plugin, if it runs, as Kubernetes does and expects it to exit with success.
    #[track_caller]
    pub fn stop_node(&mut self) {
        if let Some(process) = self.process.take() {
            let status = process.terminate();
            assert!(status.success(), "{} ended with {status}: {process}", process.name());
        }
    }
}

/// The call was refused with this code and with all of these words.
#[track_caller]
pub fn check_refused<T: std::fmt::Debug>(outcome: Result<T, Status>, code: Code, words: &[&str]) {
    let status = outcome.expect_err("the call must fail");
    assert_eq!(status.code(), code, "{}", status.message());
    for word in words {
        assert!(status.message().contains(word), "{word:?} is missing in: {}", status.message());
    }
    assert!(!status.message().contains("stack backtrace"), "{}", status.message());
    assert!(!status.message().contains('\n'), "more than one line: {}", status.message());
}

/// Names in a directory, sorted; none if there is no such directory.
pub fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
