//! Keys of labels and annotations on Mountpoint Pods, headroom Pods and workloads. All are prefixed with the driver's name, as those of
//! earlier drivers.

/// The keys of one driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataKeys {
    driver: String,
}

impl MetadataKeys {
    pub fn new(driver: &str) -> Self {
        Self { driver: driver.to_owned() }
    }

    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// Annotation, set by the controller: the node ends the Pod as soon as its source is not in use.
    pub fn needs_unmount(&self) -> String {
        self.of("needs-unmount")
    }

    /// Annotation, set by operators to drain a Pod.
    pub fn no_new_workload(&self) -> String {
        self.of("no-new-workload")
    }

    /// Label: the version of the driver that created the object.
    pub fn driver_version(&self) -> String {
        self.of("mounted-by-csi-driver-version")
    }

    /// Label: the version of the engine.
    pub fn mountpoint_version(&self) -> String {
        self.of("mountpoint-version")
    }

    /// Label: UID of the workload after which the Pod is named.
    pub fn pod_uid(&self) -> String {
        self.of("pod-uid")
    }

    /// Label of a Mountpoint Pod that has another name than its source, because it took over from another one or was warm.
    pub fn source(&self) -> String {
        self.of("source")
    }

    /// Label of a Mountpoint Pod that no source has adopted yet: what it was created from.
    pub fn warm(&self) -> String {
        self.of("warm")
    }

    /// Annotation, and label if it is a valid label value: the PV's name.
    pub fn volume_name(&self) -> String {
        self.of("volume-name")
    }

    /// Annotation: the PV's volume handle.
    pub fn volume_id(&self) -> String {
        self.of("volume-id")
    }

    /// Scheduling gate of workloads that want room for their Mountpoint Pods. AWS's driver has one of this name.
    pub fn headroom_gate(&self) -> String {
        self.of("reserve-headroom-for-mppod")
    }

    /// Label of a workload whose gate was removed: its UID. Headroom Pods must be where a Pod with it is, and its Mountpoint Pods may
    /// preempt them.
    pub fn headroom_for_workload(&self) -> String {
        self.of("headroom-for-workload")
    }

    /// Label of a headroom Pod: the UID of the workload.
    pub fn headroom_for_pod(&self) -> String {
        self.of("headroom-for-pod")
    }

    /// Annotation of a headroom Pod, and label if it is a valid label value: the PV's name.
    pub fn headroom_for_volume(&self) -> String {
        self.of("headroom-for-volume")
    }

    /// Label of the claims of caches of kind `ephemeral`.
    pub fn cache_type(&self) -> String {
        self.of("type")
    }

    fn of(&self, name: &str) -> String {
        format!("{}/{name}", self.driver)
    }
}

/// Whether the API server accepts this text as the value of a label.
pub fn is_label_value(text: &str) -> bool {
    let is_edge = |it: Option<u8>| it.is_none_or(|it| it.is_ascii_alphanumeric());
    text.len() <= 63
        && is_edge(text.bytes().next())
        && is_edge(text.bytes().last())
        && text.bytes().all(|it| it.is_ascii_alphanumeric() || matches!(it, b'-' | b'_' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_earlier_drivers() {
        let keys = MetadataKeys::new("s3.csi.scality.com");
        assert_eq!(keys.needs_unmount(), "s3.csi.scality.com/needs-unmount");
        assert_eq!(keys.driver_version(), "s3.csi.scality.com/mounted-by-csi-driver-version");
    }

    #[test]
    fn label_values() {
        let check = |text: &str, expected: bool| assert_eq!(is_label_value(text), expected, "{text:?}");
        check("", true);
        check("1.19.0-rc_1", true);
        check(&"a".repeat(63), true);
        check(&"a".repeat(64), false);
        check("a/b", false);
        check("-a", false);
        check("a.", false);
    }
}
