# s3csi: the menu. `make help` lists what you can order.
