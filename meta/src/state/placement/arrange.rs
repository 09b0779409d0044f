//! Groups are given to devices: kept, filled, evened out.

use std::cmp::Reverse;

use super::{Candidate, score};
use crate::ids::{DeviceId, PgIndex, PoolId};

/// Evening out is repeated at most this often: one pass does nearly all, and a later one what an earlier one
/// made possible. Then what is left stays.
const PASSES_MAX: usize = 4;

/// The groups of a pool, members as positions among the candidates.
struct Plan<'a> {
    candidates: &'a [Candidate],
    seeds: Vec<u64>,
    groups: Vec<Vec<usize>>,
    load: Vec<u32>,
    /// Shares, rounded down and up.
    least: Vec<u32>,
    most: Vec<u32>,
}

/// The members that each group should have: those of `current` that may stay, in their order, then new ones.
///
/// No two members of a group share a domain, so that a group may have fewer than `replicas`.
pub(crate) fn arrange(
    pool: PoolId,
    replicas: usize,
    candidates: &[Candidate],
    current: &[Vec<DeviceId>],
) -> Vec<Vec<DeviceId>> {
    let count = u32::try_from(current.len()).expect("a pool has at most 16384 groups");
    let shares = shares(candidates, replicas, count);
    let mut plan = Plan {
        candidates,
        seeds: (0..count)
            .map(|index| score::seed(pool, PgIndex(index)))
            .collect(),
        groups: Vec::with_capacity(current.len()),
        load: vec![0; candidates.len()],
        least: shares.iter().map(|(least, _)| *least).collect(),
        most: shares.iter().map(|(_, most)| *most).collect(),
    };
    plan.keep(current, replicas);
    plan.fill(replicas);
    for _ in 0..PASSES_MAX {
        if plan.feed_the_poor() + plan.relieve_the_rich() == 0 {
            break;
        }
    }
    let names = |group: &Vec<usize>| group.iter().map(|index| candidates[*index].id).collect();
    plan.groups.iter().map(names).collect()
}

/// The share of each candidate, rounded down and up.
fn shares(candidates: &[Candidate], replicas: usize, groups: u32) -> Vec<(u32, u32)> {
    let domains = candidates
        .iter()
        .map(|one| one.domain + 1)
        .max()
        .unwrap_or(0);
    let mut weights = vec![0_u128; domains];
    for one in candidates {
        weights[one.domain] += u128::from(one.weight);
    }
    let cap = u128::from(groups);
    let mut full = vec![false; domains];
    let mut slots = cap * replicas.min(domains) as u128;
    let mut weight: u128 = weights.iter().sum();
    // A domain whose part is more than one replica of every group is full with that; the others share the
    // rest, which may fill another.
    while let Some(domain) = (0..domains).find(|domain| {
        !full[*domain] && weights[*domain] > 0 && slots * weights[*domain] > cap * weight
    }) {
        full[domain] = true;
        slots -= cap;
        weight -= weights[domain];
    }
    let share = |one: &Candidate| {
        let own = u128::from(one.weight);
        let (part, whole) = match full[one.domain] {
            true => (cap * own, weights[one.domain]),
            false => (slots * own, weight),
        };
        let least = u32::try_from(part / whole).unwrap_or(groups);
        (least, least + u32::from(part % whole != 0))
    };
    candidates.iter().map(share).collect()
}

impl Plan<'_> {
    fn keep(&mut self, current: &[Vec<DeviceId>], replicas: usize) {
        let mut by_id: Vec<(DeviceId, usize)> = self
            .candidates
            .iter()
            .enumerate()
            .map(|(index, one)| (one.id, index))
            .collect();
        by_id.sort_unstable();
        for members in current {
            let mut kept: Vec<usize> = Vec::with_capacity(replicas);
            for member in members {
                let Ok(found) = by_id.binary_search_by_key(member, |(id, _)| *id) else {
                    continue;
                };
                let index = by_id[found].1;
                if kept.len() < replicas && self.apart(&kept, index, None) {
                    kept.push(index);
                    self.load[index] += 1;
                }
            }
            self.groups.push(kept);
        }
    }

    /// Whether a candidate shares its domain with no member, but for the one that it replaces.
    fn apart(&self, members: &[usize], candidate: usize, replaced: Option<usize>) -> bool {
        let domain = self.candidates[candidate].domain;
        !members
            .iter()
            .any(|member| Some(*member) != replaced && self.candidates[*member].domain == domain)
    }

    fn lot(&self, group: usize, candidate: usize) -> u128 {
        self.candidates[candidate].drawer.lot(self.seeds[group])
    }

    /// Missing members: the best draw among those below their share, or else of those with room, or else of
    /// all.
    fn fill(&mut self, replicas: usize) {
        for group in 0..self.groups.len() {
            if self.groups[group].len() >= replicas {
                continue;
            }
            let lots: Vec<u128> = (0..self.candidates.len())
                .map(|candidate| self.lot(group, candidate))
                .collect();
            while self.groups[group].len() < replicas {
                let best = (0..self.candidates.len())
                    .filter(|one| self.candidates[*one].joins)
                    .filter(|one| self.apart(&self.groups[group], *one, None))
                    .min_by_key(|one| {
                        let load = self.load[*one];
                        let (is_fed, is_full) = (load >= self.least[*one], load >= self.most[*one]);
                        (is_full, is_fed, lots[*one], *one)
                    });
                let Some(best) = best else { break };
                self.groups[group].push(best);
                self.load[best] += 1;
            }
        }
    }

    fn replace(&mut self, group: usize, old: usize, new: usize) {
        let members = &mut self.groups[group];
        let place = members.iter().position(|member| *member == old);
        members[place.expect("the replaced member is in the group")] = new;
        self.load[old] -= 1;
        self.load[new] += 1;
    }

    /// Those below their share take groups, where they draw best, from those that can give. Returns how many
    /// moved.
    fn feed_the_poor(&mut self) -> usize {
        let mut moved = 0;
        for poor in 0..self.candidates.len() {
            if self.load[poor] >= self.least[poor] || !self.candidates[poor].joins {
                continue;
            }
            let mut groups: Vec<usize> = (0..self.groups.len())
                .filter(|group| !self.groups[*group].contains(&poor))
                .collect();
            groups.sort_by_cached_key(|group| self.lot(*group, poor));
            // First from those who have too much, then from those who stay within their share.
            for spare in [&self.most, &self.least].map(Clone::clone) {
                for group in &groups {
                    if self.load[poor] >= self.least[poor] {
                        break;
                    }
                    let giver = self.groups[*group]
                        .iter()
                        .copied()
                        .filter(|member| *member != poor && self.load[*member] > spare[*member])
                        .filter(|member| self.apart(&self.groups[*group], poor, Some(*member)))
                        .max_by_key(|member| (self.load[*member] - spare[*member], *member));
                    if let Some(giver) = giver {
                        self.replace(*group, giver, poor);
                        moved += 1;
                    }
                }
            }
        }
        moved
    }

    /// Those above their share give groups, where they draw worst, to those with room. Returns how many
    /// moved.
    fn relieve_the_rich(&mut self) -> usize {
        let mut moved = 0;
        for rich in 0..self.candidates.len() {
            if self.load[rich] <= self.most[rich] {
                continue;
            }
            let mut groups: Vec<usize> = (0..self.groups.len())
                .filter(|group| self.groups[*group].contains(&rich))
                .collect();
            groups.sort_by_cached_key(|group| Reverse(self.lot(*group, rich)));
            for group in groups {
                if self.load[rich] <= self.most[rich] {
                    break;
                }
                let taker = (0..self.candidates.len())
                    .filter(|one| self.candidates[*one].joins && self.load[*one] < self.most[*one])
                    .filter(|one| !self.groups[group].contains(one))
                    .filter(|one| self.apart(&self.groups[group], *one, Some(rich)))
                    .min_by_key(|one| {
                        let needs = self.load[*one] < self.least[*one];
                        (!needs, self.lot(group, *one), *one)
                    });
                if let Some(taker) = taker {
                    self.replace(group, rich, taker);
                    moved += 1;
                }
            }
        }
        moved
    }
}
