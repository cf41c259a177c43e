//! Memory that other programs take between a query and a creation.

use crate::common;
use crate::common::{D0, G, books::books};
use crate::on_both;
use cuvmm::driver::{Call, Driver};
use cuvmm::{Limit, Pool, Region};

on_both! {
    fn a_pool_is_refused_what_another_program_took_and_has_it_later(rig) {
        let all = rig.machine.memory_info(D0).unwrap().free;
        let (pool, tenant) = common::tenancy(rig, 8);
        let first = tenant.allocate(2 * G).unwrap();
        rig.machine.set_used_elsewhere_before(Call::MemCreate, 1, D0, all);
        let refused = tenant.try_allocate(4 * G).unwrap_err();
        assert!(refused.to_string().contains("OUT_OF_MEMORY"), "{refused}");
        assert_eq!(books(rig, &pool).in_use, 2 * G);
        let refused = tenant.allocate(4 * G).unwrap_err();
        assert!(refused.to_string().contains("OUT_OF_MEMORY"), "{refused}");
        rig.machine.set_used_elsewhere(D0, 0);
        let second = tenant.allocate(4 * G).unwrap();
        assert_eq!(books(rig, &pool).in_use, 6 * G);
        drop((first, second));
    }

    fn a_limit_by_what_is_free_is_no_promise(rig) {
        let all = rig.machine.memory_info(D0).unwrap().free;
        let limit = Limit::Bytes(all);
        let (_pool, tenant) = common::with_tenant(Pool::builder(&rig.device).limit(limit).build().unwrap());
        rig.machine.set_used_elsewhere(D0, all - 3 * G);
        let refused = tenant.try_allocate(4 * G).unwrap_err();
        assert!(refused.to_string().contains("OUT_OF_MEMORY"), "{refused}");
        let block = tenant.try_allocate(3 * G).unwrap();
        drop(block);
    }

    fn a_region_commits_nothing_when_a_part_is_refused(rig) {
        let all = rig.machine.memory_info(D0).unwrap().free;
        let mut region = Region::builder(&rig.device, 4 * G).largest_extent(G).reserve().unwrap();
        let before = rig.machine.snapshot();
        rig.machine.set_used_elsewhere_before(Call::MemCreate, 3, D0, all);
        let refused = region.commit(0..4 * G).unwrap_err();
        assert!(refused.to_string().contains("OUT_OF_MEMORY"), "{refused}");
        rig.machine.set_used_elsewhere(D0, 0);
        assert_eq!(rig.machine.snapshot(), before);
        region.commit(0..4 * G).unwrap();
    }
}
