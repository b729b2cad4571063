//! A multimap.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;

/// Values are sorted and unique. Most keys have exactly one, for which a set of the standard library would occupy ten times as much.
#[derive(Debug)]
pub struct Index<Key, Value>(HashMap<Key, Vec<Value>>);

impl<Key, Value> Default for Index<Key, Value> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<Key: Eq + Hash, Value: Ord> Index<Key, Value> {
    pub fn insert(&mut self, key: Key, value: Value) {
        let values = self.0.entry(key).or_default();
        if let Err(position) = values.binary_search(&value) {
            if values.is_empty() {
                values.reserve_exact(1);
            }
            values.insert(position, value);
        }
    }

    pub fn remove<K, V>(&mut self, key: &K, value: &V)
    where
        Key: Borrow<K>,
        K: Eq + Hash + ?Sized,
        Value: Borrow<V>,
        V: Ord + ?Sized,
    {
        if let Some(values) = self.0.get_mut(key) {
            if let Ok(position) = values.binary_search_by(|it| it.borrow().cmp(value)) {
                values.remove(position);
            }
            if values.is_empty() {
                self.0.remove(key);
            }
        }
    }

    pub fn get<K>(&self, key: &K) -> impl Iterator<Item = &Value> + use<'_, Key, Value, K>
    where
        Key: Borrow<K>,
        K: Eq + Hash + ?Sized,
    {
        self.0.get(key).into_iter().flatten()
    }

    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.0.keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_sorted_and_unique() {
        let mut index = Index::default();
        for value in ["b", "a", "c", "a"] {
            index.insert("key", value.to_owned());
        }
        index.remove("key", "b");
        index.remove("key", "missing");
        assert_eq!(index.get("key").collect::<Vec<_>>(), ["a", "c"]);
        for value in ["a", "c"] {
            index.remove("key", value);
        }
        assert_eq!(index.keys().count(), 0);
    }
}
