//! Several engines on files that replicate over loopback TCP.

mod net {
    mod failover;
    mod full;
    mod hostile;
    mod hotplug;
    mod leases;
    mod lost_leaf;
    mod members;
    mod meta;
    mod peer;
    mod replication;
    mod rig;
    mod scrub;
    mod strays;
}
