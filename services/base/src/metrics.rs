//! Metrics that several services have.

use api::metrics::{Family, Page};
use api::types::RequestStats;

/// Bounds of a histogram's buckets in nanoseconds: few, as every operation of every attachment has them. Each
/// is a bound of the finer buckets that a data thread counts in.
const LATENCY_BOUNDS_NS: [u64; 11] = {
    let mut bounds = [16_000; 11];
    let mut at = 1;
    while at < bounds.len() {
        bounds[at] = bounds[at - 1] * 4;
        at += 1;
    }
    bounds
};
const NS_PER_S: f64 = 1e9;

/// Puts one histogram.
pub fn put_latency(
    page: &mut Page,
    family: &'static Family,
    labels: &[&str],
    requests: &RequestStats,
) {
    let buckets = LATENCY_BOUNDS_NS.map(|ns| (ns as f64 / NS_PER_S, requests.below(ns)));
    let sum = requests.sum_ns as f64 / NS_PER_S;
    page.put_histogram(family, labels, &buckets, sum, requests.requests);
}
