//! What the API server was asked: one event per finished request, as its audit log has it.

use std::fs;
use std::path::Path;

use serde::Deserialize;

/// Who did what to which object, when a request was finished; bodies are never logged.
pub(super) const POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- level: Metadata
";

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEvent {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, …
    pub verb: String,
    #[serde(rename = "requestURI")]
    pub request_uri: String,
    #[serde(default)]
    pub user_agent: String,
    pub user: User,
    /// Absent for requests about no resource, such as `/version`.
    #[serde(default)]
    pub object_ref: Option<ObjectReference>,
    #[serde(default)]
    pub response_status: Option<ResponseStatus>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct User {
    pub username: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectReference {
    /// `pods`, `leases`, …
    pub resource: String,
    /// `status`, `eviction`, … or nothing.
    pub subresource: String,
    pub api_group: String,
    pub namespace: String,
    pub name: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct ResponseStatus {
    #[serde(default)]
    pub code: u16,
}

/// All events so far. A last line that is only half written yet is left out.
pub(super) fn read(path: &Path) -> Vec<AuditEvent> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_and_a_half_written_one_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let whole = r#"{"verb":"create","requestURI":"/api/v1/namespaces/default/pods","user":{"username":"admin"},
            "objectRef":{"resource":"pods","namespace":"default","apiVersion":"v1"},"responseStatus":{"code":201}}"#;
        let text = format!("{}\n{{\"verb\":\"get\",\"requ", whole.replace('\n', ""));
        fs::write(file.path(), text).unwrap();
        let [event] = read(file.path()).try_into().unwrap();
        assert_eq!(event.verb, "create");
        assert_eq!(event.object_ref.unwrap().resource, "pods");
        assert_eq!(event.response_status.unwrap().code, 201);
    }
}
