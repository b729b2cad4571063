//! Resources of Mountpoint Pods whose PV does not set them.

use super::{PodShape, Resources};
use crate::quantity::Quantity;

/// Requests and limits for volumes that set none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DefaultResources {
    pub requests: Resources,
    pub limits: Resources,
}

impl DefaultResources {
    /// Requests and limits of the Pod for a volume. The volume's own settings win, and a default never contradicts them: the API
    /// server would reject a Pod that requests more than its limit.
    pub fn apply(&self, shape: &PodShape) -> (Resources, Resources) {
        let Self { requests, limits } = self;
        let (cpu_request, cpu_limit) = merge((&shape.requests.cpu, &shape.limits.cpu), (&requests.cpu, &limits.cpu));
        let (memory_request, memory_limit) =
            merge((&shape.requests.memory, &shape.limits.memory), (&requests.memory, &limits.memory));
        let requests = Resources { cpu: cpu_request, memory: memory_request };
        (requests, Resources { cpu: cpu_limit, memory: memory_limit })
    }
}

type RequestAndLimit<'a> = (&'a Option<Quantity>, &'a Option<Quantity>);

fn merge(own: RequestAndLimit<'_>, default: RequestAndLimit<'_>) -> (Option<Quantity>, Option<Quantity>) {
    let is_less = |one: &Quantity, other: &Quantity| one.thousandths() < other.thousandths();
    let limit = match (own, default.1) {
        ((_, Some(limit)), _) => Some(limit),
        ((Some(request), None), Some(limit)) if is_less(limit, request) => Some(request),
        ((_, None), limit) => limit.as_ref(),
    };
    let request = match (own.0, default.0, limit) {
        (Some(request), ..) => Some(request),
        (None, Some(request), Some(limit)) if is_less(limit, request) => Some(limit),
        (None, request, _) => request.as_ref(),
    };
    (request.cloned(), limit.cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests and limits of memory: of the volume, by default, and of the Pod.
    #[track_caller]
    fn check(own: (&str, &str), default: (&str, &str), expected: (&str, &str)) {
        let memory = |text: &str| {
            let memory = (!text.is_empty()).then(|| text.parse().unwrap());
            Resources { cpu: None, memory }
        };
        let shape = PodShape { requests: memory(own.0), limits: memory(own.1), ..PodShape::default() };
        let defaults = DefaultResources { requests: memory(default.0), limits: memory(default.1) };
        assert_eq!(defaults.apply(&shape), (memory(expected.0), memory(expected.1)));
    }

    #[test]
    fn volumes_without_settings_get_the_defaults() {
        check(("", ""), ("64Mi", "2Gi"), ("64Mi", "2Gi"));
        check(("", ""), ("64Mi", ""), ("64Mi", ""));
        check(("", ""), ("", ""), ("", ""));
    }

    #[test]
    fn settings_of_a_volume_win() {
        check(("128Mi", "1Gi"), ("64Mi", "2Gi"), ("128Mi", "1Gi"));
        check(("", "1Gi"), ("64Mi", "2Gi"), ("64Mi", "1Gi"));
        check(("128Mi", ""), ("64Mi", "2Gi"), ("128Mi", "2Gi"));
    }

    #[test]
    fn defaults_never_contradict_a_volume() {
        check(("", "32Mi"), ("64Mi", "2Gi"), ("32Mi", "32Mi"));
        check(("4Gi", ""), ("64Mi", "2Gi"), ("4Gi", "4Gi"));
        check(("", "65536Ki"), ("64Mi", "2Gi"), ("64Mi", "65536Ki"));
        check(("2048Mi", ""), ("64Mi", "2Gi"), ("2048Mi", "2Gi"));
    }
}
