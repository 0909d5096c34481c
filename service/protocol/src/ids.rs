//! The form of id maps in documents: a list of `INSIDE:HOST:COUNT`, validated when it is read. For serde's `with`.

use poolfs_types::{IdMap, IdRange};
use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::Serializer;

/// Writes the ranges of a map.
///
/// # Errors
/// The serializer's.
pub fn serialize<S: Serializer>(map: &Option<IdMap>, serializer: S) -> Result<S::Ok, S::Error> {
    match map {
        Some(map) => serializer.collect_seq(map.ranges().iter().map(IdRange::to_string)),
        None => serializer.serialize_none(),
    }
}

/// Reads them.
///
/// # Errors
/// When they are no map.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IdMap>, D::Error> {
    let Some(texts) = Option::<Vec<String>>::deserialize(deserializer)? else { return Ok(None) };
    let ranges = texts.iter().map(|text| text.parse()).collect::<Result<Vec<IdRange>, _>>().map_err(Error::custom)?;
    IdMap::new(ranges).map(Some).map_err(Error::custom)
}
