//! fsx: random operations on one file, compared with a model.

use s3csi_testbed::fsx;

use crate::on_both_servers;
use crate::world::World;

on_both_servers!(random_operations_give_the_bytes_of_a_local_file);

fn random_operations_give_the_bytes_of_a_local_file(world: &World) {
    let mount = world.mount();
    fsx::check(&world.fixture, mount.directory());
    mount.unmount();
}
