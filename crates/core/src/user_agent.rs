//! What we call ourselves in the store's access log.

/// `s3-csi-driver/<version> credential-source#<source>[ k8s/<version>]`.
///
/// Control characters are left out: the text becomes a command-line argument and an HTTP header.
pub fn user_agent(driver_version: &str, source: &str, kubernetes: Option<&str>) -> String {
    let mut text = format!("s3-csi-driver/{driver_version} credential-source#{source}");
    if let Some(version) = kubernetes.filter(|it| !it.is_empty()) {
        text.push_str(" k8s/");
        text.push_str(version);
    }
    text.retain(|it| !it.is_control());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_agents() {
        assert_eq!(
            user_agent("2.1.1", "driver", Some("v1.30.6")),
            "s3-csi-driver/2.1.1 credential-source#driver k8s/v1.30.6"
        );
        assert_eq!(user_agent("2.1.1", "secret", None), "s3-csi-driver/2.1.1 credential-source#secret");
        assert_eq!(user_agent("2.1.1", "secret", Some("")), "s3-csi-driver/2.1.1 credential-source#secret");
        assert_eq!(user_agent("1\r\n", "driver", Some("v1\n")), "s3-csi-driver/1 credential-source#driver k8s/v1");
    }
}
