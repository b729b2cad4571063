//! What an engine may use, in Kubernetes' own spelling of quantities.

use std::collections::BTreeMap;

/// Keys of the volume context; those of the PV's `volumeAttributes` that earlier drivers documented, and one for tasks.
pub mod context {
    pub const MEMORY: &str = "mountpointContainerResourcesLimitsMemory";
    pub const CPU: &str = "mountpointContainerResourcesLimitsCpu";
    pub const TASKS: &str = "mountpointContainerResourcesLimitsTasks";
}

/// Nothing said, nothing limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceLimits {
    pub memory_bytes: Option<u64>,
    /// Thousandths of one processor.
    pub cpu_millis: Option<u64>,
    pub tasks: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} {value:?} is not a {expected}")]
pub struct InvalidLimit {
    name: String,
    value: String,
    expected: &'static str,
}

const MEMORY_EXPECTED: &str = "quantity of memory such as 512Mi or 1G, greater than zero";
const CPU_EXPECTED: &str = "quantity of processors such as 500m or 2, greater than zero";
const TASKS_EXPECTED: &str = "number greater than zero";

impl ResourceLimits {
    pub fn parse(attributes: &BTreeMap<String, String>) -> Result<Self, InvalidLimit> {
        let read = |name: &str, parse: fn(&str) -> Option<u64>, expected| match attributes.get(name) {
            None => Ok(None),
            Some(value) if value.is_empty() => Ok(None),
            Some(value) => match parse(value) {
                Some(limit) => Ok(Some(limit)),
                None => Err(InvalidLimit { name: name.to_owned(), value: value.clone(), expected }),
            },
        };
        Ok(Self {
            memory_bytes: read(context::MEMORY, memory, MEMORY_EXPECTED)?,
            cpu_millis: read(context::CPU, cpu, CPU_EXPECTED)?,
            tasks: read(context::TASKS, |it| it.parse().ok().filter(|it| *it > 0), TASKS_EXPECTED)?,
        })
    }
}

/// Bytes.
pub fn parse_memory(text: &str) -> Result<u64, InvalidLimit> {
    memory(text).ok_or_else(|| InvalidLimit {
        name: "memory limit".to_owned(),
        value: text.to_owned(),
        expected: MEMORY_EXPECTED,
    })
}

/// Thousandths of one processor.
pub fn parse_cpu(text: &str) -> Result<u64, InvalidLimit> {
    cpu(text).ok_or_else(|| InvalidLimit {
        name: "processor limit".to_owned(),
        value: text.to_owned(),
        expected: CPU_EXPECTED,
    })
}

fn memory(text: &str) -> Option<u64> {
    let digits = text.find(|it: char| !it.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit {
        "" => 1,
        "k" => 1000,
        "M" => 1000_u64.pow(2),
        "G" => 1000_u64.pow(3),
        "T" => 1000_u64.pow(4),
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor).filter(|it| *it > 0)
}

fn cpu(text: &str) -> Option<u64> {
    let millis = if let Some(millis) = text.strip_suffix('m') {
        millis.parse().ok()?
    } else {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        if fraction.len() > 3 || !fraction.bytes().all(|it| it.is_ascii_digit()) {
            return None;
        }
        let thousandths: u64 = format!("{fraction:0<3}").parse().ok()?;
        whole.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(thousandths)?
    };
    (millis > 0).then_some(millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_memory(text: &str, expected: Option<u64>) {
        assert_eq!(memory(text), expected, "{text}");
    }

    #[track_caller]
    fn check_cpu(text: &str, expected: Option<u64>) {
        assert_eq!(cpu(text), expected, "{text}");
    }

    #[test]
    fn memory_is_spelled_as_in_kubernetes() {
        check_memory("512Mi", Some(512 << 20));
        check_memory("1G", Some(1_000_000_000));
        check_memory("1048576", Some(1 << 20));
        for wrong in ["", "0", "Mi", "1.5Gi", "-1", "1 Gi", "1gi", "99999999999Ti"] {
            check_memory(wrong, None);
        }
    }

    #[test]
    fn processors_are_spelled_as_in_kubernetes() {
        check_cpu("500m", Some(500));
        check_cpu("2", Some(2000));
        check_cpu("0.5", Some(500));
        check_cpu("1.25", Some(1250));
        check_cpu("1.234", Some(1234));
        for wrong in ["", "0", "0m", "m", "-1", "1.2345", "1.x", "1,5", "."] {
            check_cpu(wrong, None);
        }
    }

    #[test]
    fn limits_of_a_volume() {
        let attributes = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        assert_eq!(ResourceLimits::parse(&attributes(&[("bucketName", "x")])), Ok(ResourceLimits::default()));
        let all = [(context::MEMORY, "1Gi"), (context::CPU, "1"), (context::TASKS, "64")];
        let expected = ResourceLimits { memory_bytes: Some(1 << 30), cpu_millis: Some(1000), tasks: Some(64) };
        assert_eq!(ResourceLimits::parse(&attributes(&all)), Ok(expected));
        let error = ResourceLimits::parse(&attributes(&[(context::TASKS, "many")])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "mountpointContainerResourcesLimitsTasks \"many\" is not a number greater than zero"
        );
        assert!(ResourceLimits::parse(&attributes(&[(context::TASKS, "0")])).is_err());
    }
}
