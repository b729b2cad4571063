//! values.schema.json as a list of values. Each value has an example in it, so a new value comes with a way to try it.

use serde_json::Value;

use crate::chart::read;

pub struct Schema {
    /// Path and example of each value that means something.
    pub values: Vec<(String, Value)>,
    /// Values of earlier charts that are accepted and ignored.
    pub ignored: Vec<String>,
    /// Paths whose members are listed completely; the root's is empty.
    pub closed: Vec<String>,
}

impl Schema {
    pub fn read() -> Self {
        let schema: Value = serde_json::from_str(&read("charts/s3csi/values.schema.json")).unwrap();
        let mut found = Self { values: Vec::new(), ignored: Vec::new(), closed: Vec::new() };
        found.collect("", &schema);
        assert!(found.values.len() > 50, "the schema was not understood: {} values", found.values.len());
        found
    }

    fn collect(&mut self, path: &str, schema: &Value) {
        if schema["deprecated"] == true {
            self.ignored.push(path.to_owned());
            return;
        }
        if schema["additionalProperties"] == false {
            self.closed.push(path.to_owned());
        }
        if let Some(example) = schema["examples"].get(0) {
            self.values.push((path.to_owned(), example.clone()));
            return;
        }
        let members = schema["properties"].as_object();
        let members = members.unwrap_or_else(|| panic!("value {path:?} has neither an example nor members"));
        for (name, member) in members {
            let separator = if path.is_empty() { "" } else { "." };
            self.collect(&format!("{path}{separator}{name}"), member);
        }
    }
}
