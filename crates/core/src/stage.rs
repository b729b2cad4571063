//! The staging directory of an engine, for files above 8 MiB that are edited in place: how large it may become.

use std::str::FromStr;

use crate::quantity::Quantity;

/// Options of the engine.
pub const STAGE_OPTION: &str = "--stage";
pub const MAX_STAGE_SIZE_OPTION: &str = "--max-stage-size";

/// kubelet evicts a Pod that fills its emptyDir. The engine must refuse writes before, and it does not count directories and the
/// small files that describe the large ones.
const SHARE_PERCENT: u128 = 95;

/// The largest number that the engine accepts.
const MAX_MEBIBYTES: u64 = 1 << 40;

/// The size limit of a staging directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StageLimit {
    /// No directory: files above 8 MiB cannot be edited in place.
    Off,
    Size(Quantity),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a size such as 1Gi, or 0 for none")]
pub struct InvalidStageLimit(String);

impl FromStr for StageLimit {
    type Err = InvalidStageLimit;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "" | "0" => Ok(Self::Off),
            size => size.parse().map(Self::Size).map_err(|_| InvalidStageLimit(text.to_owned())),
        }
    }
}

impl StageLimit {
    pub const fn size(&self) -> Option<&Quantity> {
        match self {
            Self::Off => None,
            Self::Size(size) => Some(size),
        }
    }
}

/// How many MiB an engine may use of a directory of this size.
pub fn usable_mebibytes(size: &Quantity) -> u64 {
    let mebibytes = size.thousandths() / 1000 * SHARE_PERCENT / 100 / (1 << 20);
    u64::try_from(mebibytes).unwrap_or(MAX_MEBIBYTES).min(MAX_MEBIBYTES)
}

/// The value of `--max-stage-size` where the volume's mount options have this value and the directory has room for `most` MiB.
/// `None`: the option is no number, and the engine refuses it.
pub fn max_stage_size(given: Option<&str>, most: u64) -> Option<u64> {
    match given.map(str::parse::<u64>) {
        None => Some(most),
        Some(Ok(given)) => Some(given.min(most)),
        Some(Err(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits() {
        let size = |text: &str| Ok(StageLimit::Size(text.parse().unwrap()));
        check("1Gi", size("1Gi"));
        check("0.5G", size("0.5G"));
        check("", Ok(StageLimit::Off));
        check("0", Ok(StageLimit::Off));
        check("much", Err("\"much\" is not a size such as 1Gi, or 0 for none"));
        check("-1", Err("\"-1\" is not a size such as 1Gi, or 0 for none"));
    }

    #[track_caller]
    fn check(text: &str, expected: Result<StageLimit, &str>) {
        assert_eq!(text.parse::<StageLimit>().map_err(|it| it.to_string()), expected.map_err(str::to_owned));
    }

    #[test]
    fn an_engine_stays_below_the_size_at_which_kubelet_evicts() {
        let usable = |text: &str| usable_mebibytes(&text.parse().unwrap());
        assert_eq!(usable("1Gi"), 972);
        assert_eq!(usable("100Mi"), 95);
        assert_eq!(usable("1Mi"), 0);
        assert_eq!(usable("999999999999999Ei"), MAX_MEBIBYTES);
    }

    #[test]
    fn a_volume_may_ask_for_less_and_not_for_more() {
        assert_eq!(max_stage_size(None, 972), Some(972));
        assert_eq!(max_stage_size(Some("100"), 972), Some(100));
        assert_eq!(max_stage_size(Some("0"), 972), Some(0));
        assert_eq!(max_stage_size(Some("5000"), 972), Some(972));
        assert_eq!(max_stage_size(Some("much"), 972), None);
    }
}
