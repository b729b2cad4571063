# Read by CMake before each of the engine's C libraries is configured (.cargo/config.toml).
# The engine's TLS is s2n-tls, which uses AWS-LC's cryptography only: without its own TLS library it compiles a quarter faster.
set(BUILD_LIBSSL OFF CACHE BOOL "" FORCE)
