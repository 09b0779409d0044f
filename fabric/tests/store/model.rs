//! Everything is compared with a reference model after every step.

use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::history::{apply, generate};
use crate::rig::Rig;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn the_store_holds_what_the_model_holds(seed in any::<u64>(), chunks in 1..4u32, span in 64..4000u32) {
        let mut rig = Rig::new(24 << 20, seed);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for round in 0..4 {
            for step in 0..60 {
                let op = generate(&mut rng, chunks, span, true);
                apply(&mut rig, op);
                if step % 10 == 0 {
                    rig.compare_all();
                    rig.check();
                }
            }
            rig.compare_all();
            if round % 2 == 0 {
                rig.process_crash();
            }
        }
        rig.compare_all();
    }
}
