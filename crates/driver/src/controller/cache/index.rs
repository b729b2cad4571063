//! A multimap.

use std::borrow::Borrow;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

#[derive(Debug)]
pub struct Index<Key, Value>(HashMap<Key, BTreeSet<Value>>);

impl<Key, Value> Default for Index<Key, Value> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<Key: Eq + Hash, Value: Ord> Index<Key, Value> {
    pub fn insert(&mut self, key: Key, value: Value) {
        self.0.entry(key).or_default().insert(value);
    }

    pub fn remove<K, V>(&mut self, key: &K, value: &V)
    where
        Key: Borrow<K>,
        K: Eq + Hash + ?Sized,
        Value: Borrow<V>,
        V: Ord + ?Sized,
    {
        if let Some(values) = self.0.get_mut(key) {
            values.remove(value);
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
