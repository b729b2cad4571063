//! Buckets and objects as requests name them, and the conditions that a request may set.

use s3s::dto::ETagCondition;
use s3s::{S3Result, s3_error};

use crate::data::{Data, StoredBucket, StoredObject};

impl Data {
    pub(crate) fn bucket(&self, name: &str) -> S3Result<&StoredBucket> {
        self.buckets.get(name).ok_or_else(|| s3_error!(NoSuchBucket, "The specified bucket does not exist"))
    }

    pub(crate) fn bucket_mut(&mut self, name: &str) -> S3Result<&mut StoredBucket> {
        self.buckets.get_mut(name).ok_or_else(|| s3_error!(NoSuchBucket, "The specified bucket does not exist"))
    }

    pub(crate) fn store(
        &mut self,
        bucket: &str,
        key: String,
        object: StoredObject,
        when: &RequestConditions<'_>,
    ) -> S3Result<()> {
        let objects = &mut self.bucket_mut(bucket)?.objects;
        when.check(objects.get(&key))?;
        objects.insert(key, object);
        Ok(())
    }
}

#[derive(Default)]
pub(crate) struct RequestConditions<'a> {
    pub if_match: Option<&'a ETagCondition>,
    pub if_none_match: Option<&'a ETagCondition>,
}

impl RequestConditions<'_> {
    pub(crate) fn check(&self, present: Option<&StoredObject>) -> S3Result<()> {
        let names = |condition: &ETagCondition| match condition {
            ETagCondition::Any => present.is_some(),
            ETagCondition::ETag(tag) => present.is_some_and(|it| it.entity_tag == tag.value()),
        };
        let is_met = self.if_match.is_none_or(names) && !self.if_none_match.is_some_and(names);
        if is_met { Ok(()) } else { Err(s3_error!(PreconditionFailed)) }
    }
}
