//! Join tokens: each lets one node in, once, for a time.
//!
//! Tokens expire by the wall clock of the node that proposes their use. Offers of attachments expire by the
//! leader's, and leases by monotonic clocks. A token must outlive a change of leader, and a wrong clock makes
//! it last longer or shorter, and never good twice.

use std::collections::BTreeSet;

use super::map::{cluster, take_number};
use super::tables::{COUNTERS, NODES, TOKENS};
use super::{Stop, Txn, event};
use crate::command::Outcome;
use crate::ids::{NodeId, UnixMillis};
use crate::model::{EventKind, Role, Token};
use crate::pki::TokenHash;
use crate::refusal::{JoinRefusal, MAX_TOKENS};

pub(super) fn create(
    txn: &mut Txn<'_>,
    hash: TokenHash,
    roles: Option<&BTreeSet<Role>>,
    expires_at: UnixMillis,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    cluster(txn)?;
    let roles = roles.cloned().unwrap_or_else(Role::all);
    if roles.is_empty() {
        return Err(JoinRefusal::NoRoles.into());
    }
    let (over, open): (Vec<Token>, Vec<Token>) = TOKENS
        .all(txn)?
        .into_iter()
        .partition(|token| token.expires_at <= at);
    if open.len() >= MAX_TOKENS {
        return Err(JoinRefusal::TooManyTokens.into());
    }
    for token in over {
        TOKENS.delete(txn, &token.hash);
    }
    let token = Token {
        hash,
        roles,
        created_at: at,
        expires_at,
    };
    TOKENS.put(txn, &hash, &token);
    Ok(Outcome::Done)
}

/// Forgets a token. One that is not known was used or revoked before.
pub(super) fn revoke(txn: &mut Txn<'_>, hash: TokenHash) -> Result<Outcome, Stop> {
    if TOKENS.get(txn, &hash)?.is_none() {
        return Err(JoinRefusal::NothingToRevoke.into());
    }
    TOKENS.delete(txn, &hash);
    Ok(Outcome::Done)
}

/// Takes a token and gives a number for the node that bears it, which no node ever had.
pub(super) fn redeem(
    txn: &mut Txn<'_>,
    hash: TokenHash,
    roles: &BTreeSet<Role>,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    let token = TOKENS.get(txn, &hash)?.ok_or(JoinRefusal::UnknownToken)?;
    if token.expires_at <= at {
        return Err(JoinRefusal::ExpiredToken.into());
    }
    JoinRefusal::check_roles(&token, roles)?;
    TOKENS.delete(txn, &hash);
    // The first node gave itself its number.
    let highest = NODES.all(txn)?.into_iter().map(|node| node.id.0).max();
    let mut counters = COUNTERS.get(txn, &())?.unwrap_or_default();
    counters.node = counters.node.max(highest.unwrap_or(0) + 1);
    COUNTERS.put(txn, &(), &counters);
    let node: NodeId = take_number(txn, |counters| &mut counters.node)?;
    event::push(txn, at, EventKind::NodeAdmitted { node })?;
    Ok(Outcome::Admitted(node))
}
