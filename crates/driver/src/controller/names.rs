//! Labels and annotations of Mountpoint Pods. All of them derive from the driver's name, as those of drivers before us did.

/// The names of one driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    driver: String,
}

impl Names {
    pub fn new(driver: &str) -> Self {
        Self { driver: driver.to_owned() }
    }

    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// Annotation: the node ends the Pod as soon as nobody uses its source.
    pub fn needs_unmount(&self) -> String {
        self.of("needs-unmount")
    }

    /// Annotation, set by operators who want to drain a Pod.
    pub fn no_new_workload(&self) -> String {
        self.of("no-new-workload")
    }

    /// Label: the version of the driver that made the object.
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

    /// Annotation, and label where the text is a valid one: the PV's name.
    pub fn volume_name(&self) -> String {
        self.of("volume-name")
    }

    /// Annotation: the PV's volume handle.
    pub fn volume_id(&self) -> String {
        self.of("volume-id")
    }

    /// Label of the claims that caches of kind `ephemeral` make.
    pub fn cache_type(&self) -> String {
        self.of("type")
    }

    fn of(&self, name: &str) -> String {
        format!("{}/{name}", self.driver)
    }
}

/// Whether the API server takes this text as the value of a label.
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
    fn names_are_those_of_drivers_before_us() {
        let names = Names::new("s3.csi.scality.com");
        assert_eq!(names.needs_unmount(), "s3.csi.scality.com/needs-unmount");
        assert_eq!(names.driver_version(), "s3.csi.scality.com/mounted-by-csi-driver-version");
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
