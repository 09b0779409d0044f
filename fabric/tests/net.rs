//! Several engines on files that replicate over loopback TCP.

mod net {
    mod hostile;
    mod replication;
    mod rig;
}
