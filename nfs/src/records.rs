//! Which clients may reclaim what they had open and locked, after the server started anew or moved.
//!
//! The kernel asks for a record before a client gets its first state, and has the records when its grace
//! period begins: only clients of records may reclaim, for others may have changed the files since. A client
//! that did not come back by the end of the period is forgotten, because its locks are free from then on
//! (RFC 8881, section 8.4.3). Each volume keeps the records itself, so they move with it.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// Longest name that a client gives itself, in bytes: `NFS4_OPAQUE_LIMIT`.
pub const CLIENT_BYTES_MAX: usize = 1024;
/// Most clients of a volume that are remembered; a further one cannot reclaim after a failover.
pub const CLIENTS_MAX: usize = 16_384;

/// How a client names itself: any bytes. Written in hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClientId(Vec<u8>);

impl ClientId {
    /// Of bytes; none and too many are no name.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (1..=CLIENT_BYTES_MAX)
            .contains(&bytes.len())
            .then(|| Self(bytes.to_vec()))
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<ClientId> for String {
    fn from(id: ClientId) -> Self {
        id.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl TryFrom<String> for ClientId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = |pair: &[u8]| {
            let pair = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(pair, 16).ok()
        };
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(digits).collect();
        let is_hex = text.len() % 2 == 0 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = bytes.filter(|_| is_hex).and_then(|bytes| Self::new(&bytes));
        id.ok_or_else(|| format!("{text:?} is no client"))
    }
}

/// The records of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRecords {
    /// Clients that have state.
    current: BTreeSet<ClientId>,
    /// Clients that had some when the server started, and have not come back yet.
    returning: BTreeSet<ClientId>,
}

impl ClientRecords {
    /// The server starts, here or on another node.
    pub fn begin_grace(&mut self) {
        self.returning.append(&mut self.current);
    }

    /// Its grace period is over.
    pub fn end_grace(&mut self) {
        self.returning.clear();
    }

    /// A client gets its first state, or has reclaimed what it had. False if there are too many.
    pub fn add(&mut self, client: ClientId) -> bool {
        let has_room = self.current.len() < CLIENTS_MAX || self.current.contains(&client);
        if has_room {
            self.returning.remove(&client);
            self.current.insert(client);
        }
        has_room
    }

    /// A client has gone, or its state ran out.
    pub fn remove(&mut self, client: &ClientId) {
        self.current.remove(client);
        self.returning.remove(client);
    }

    /// Clients that may reclaim once the server starts.
    pub fn reclaimable(&self) -> impl Iterator<Item = &ClientId> {
        self.current.union(&self.returning)
    }

    /// Whether nobody has anything to reclaim.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.current.is_empty() && self.returning.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn client(name: &str) -> ClientId {
        ClientId::new(name.as_bytes()).unwrap()
    }

    fn reclaimable(records: &ClientRecords) -> Vec<String> {
        let text = |id: &ClientId| String::from_utf8_lossy(id.bytes()).into_owned();
        records.reclaimable().map(text).collect()
    }

    #[test]
    fn a_client_that_does_not_come_back_in_grace_is_forgotten() {
        let mut records = ClientRecords::default();
        assert!(records.add(client("a")) && records.add(client("b")));
        records.begin_grace();
        assert_eq!(reclaimable(&records), ["a", "b"]);
        records.add(client("a"));
        records.end_grace();
        assert_eq!(reclaimable(&records), ["a"]);
    }

    #[test]
    fn a_second_failover_within_grace_forgets_nobody() {
        let mut records = ClientRecords::default();
        records.add(client("a"));
        records.add(client("b"));
        records.begin_grace();
        records.add(client("a"));
        records.begin_grace();
        assert_eq!(reclaimable(&records), ["a", "b"]);
    }

    #[test]
    fn names_that_clients_choose_are_bounded() {
        assert!(ClientId::new(b"").is_none());
        assert!(ClientId::new(&[0; CLIENT_BYTES_MAX]).is_some());
        assert!(ClientId::new(&[0; CLIENT_BYTES_MAX + 1]).is_none());
        for bad in ["\"\"", "\"a\"", "\"zz\"", "\"+a\"", "\"é\""] {
            assert!(serde_json::from_str::<ClientId>(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn records_are_read_as_they_were_written(
            names in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..8),
            grace in any::<bool>(),
        ) {
            let mut records = ClientRecords::default();
            for (nth, name) in names.iter().enumerate() {
                records.add(ClientId::new(name).unwrap());
                if grace && nth == 3 {
                    records.begin_grace();
                }
            }
            let text = serde_json::to_string(&records).unwrap();
            prop_assert_eq!(serde_json::from_str::<ClientRecords>(&text).unwrap(), records);
        }
    }
}
