//! NFS gateways and their clients in virtual machines with Debian 13's kernel.

pub mod recipe;
