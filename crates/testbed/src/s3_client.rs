//! An S3 client for tests: prepares what the code under test should find, and looks at what it left.

use aws_sdk_s3::Client;
use aws_sdk_s3::config::{BehaviorVersion, Config, Credentials, Region, RequestChecksumCalculation};
use aws_smithy_http_client::Builder;

use s3csi_s3_server::store::{Account, Store};

/// For plain HTTP.
pub fn s3_client(store: &dyn Store, account: &Account) -> Client {
    let credentials = Credentials::new(&account.access_key, &account.secret_key, None, None, "testbed");
    let config = Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .http_client(Builder::new().build_http())
        .credentials_provider(credentials)
        .region(Region::new(store.region().to_owned()))
        .endpoint_url(store.endpoint())
        .force_path_style(true)
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .build();
    Client::from_conf(config)
}
